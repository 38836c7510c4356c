// Which picture to label next: one that is in doubt, like many others, and unlike those whose label is known. The same
// as in `apps/active_learning.py`.

const NEAREST = 5; // pictures whose similarity counts

function dot(one, other) {
  let sum = 0;
  for (let i = 0; i < one.length; i++) sum += one[i] * other[i];
  return sum;
}

/** A row with length one; of zeros, as it is. */
function unit(row) {
  const length = Math.sqrt(dot(row, row));
  return Float32Array.from(row, value => value / (length || 1));
}

/** Mean cosine of each row of length one to the five nearest others; 0 for a single one. */
export function density(rows) {
  const count = Math.min(NEAREST, rows.length - 1);
  return rows.map((row, place) => {
    if (!count) return 0;
    const cosines = Float64Array.from(rows.filter((_, other) => other !== place), other => dot(row, other)).sort();
    return cosines.slice(-count).reduce((sum, value) => sum + value, 0) / count;
  });
}

/** One minus the margin between the two most probable classes. */
export function doubt(probabilities) {
  const best = [...probabilities].sort((one, other) => other - one);
  return 1 - (best[0] - (best[1] ?? 0));
}

/** Index of the picture whose label would teach most: the most typical of those at least half as much in doubt as the
 *  one most in doubt; of all of them, if nothing is known of their classes (null). */
export function mostUseful(features, probabilities, known) {
  const rows = features.map(unit), others = known.map(unit), densities = density(rows);
  const typical = rows.map((row, place) => others.length
    ? densities[place] - Math.max(...others.map(other => dot(row, other))) : densities[place]);
  const unsure = probabilities ? probabilities.map(doubt) : typical.map(() => 1), most = Math.max(...unsure);
  let best = -1;
  for (const [place, value] of typical.entries()) {
    if (unsure[place] >= most / 2 && (best < 0 || value > typical[best])) best = place;
  }
  return best;
}
