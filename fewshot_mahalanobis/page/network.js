// The network as graphs, which run in the worker: a picture and FiLM parameters in, features out. What the page that is
// taught and the answering page that it makes have in common.
"use strict";

/** FiLM parameters that change nothing: gamma 1 and beta 0 of each position. */
function identityFilm() {
  return Float32Array.from(page.positions.flatMap(([, width]) => [...Array(width).fill(1), ...Array(width).fill(0)]));
}

/** Those that a file has. */
function filmOf(tensors) {
  if (!Object.keys(tensors).some(name => name.startsWith("film."))) return identityFilm();
  return Float32Array.from(page.positions.flatMap(([position]) =>
    [...numbersOf(tensors[`film.${position}.gamma`]), ...numbersOf(tensors[`film.${position}.beta`])]));
}

/** A square as a graph reads it. */
function imagesOf(square) {
  return ["float32", Float32Array.from(square, value => value / 127.5 - 1), [1, 3, page.side, page.side]];
}

/** Features of a square, and what the set encoder reads of it: small, and statistics of the maps. */
function network(square, film) {
  const inputs = {images: imagesOf(square)};
  if (page.positions.length) inputs.film = ["float32", film, [film.length]];
  return ask({job: "run", graph: "features", inputs}, [inputs.images[1].buffer]);
}

/** Features of a square under the adaptation of what was learned. */
const featuresOf = async (square, {film}) => (await network(square, film)).features;

/** The answer to a square by what was learned: the number of the head in the worker, FiLM parameters, and the support
 *  set, whose unadapted features are null if the head compares none. Features of the square, frozen and under that
 *  adaptation, are computed unless they are known. */
async function decide(square, {number, film, table}, frozen, features) {
  features ??= (await network(square, film)).features;
  const unadapted = table.unadapted ? frozen ?? (await network(square, identityFilm())).features : features;
  const [one, other] = [features, unadapted].map(values => Float64Array.from(values));
  return ask({job: "decide", number, adapted: one, unadapted: other});
}

/** The support set that a file has: features, labels and groups, and examples of no class. */
function supportOf(tensors) {
  const labels = integersOf(tensors.support_labels);
  const rowsOf = name => {
    if (!tensors[name]) return [];
    const {shape: [n, width]} = tensors[name], numbers = Float64Array.from(numbersOf(tensors[name]));
    return Array.from({length: n}, (_, index) => numbers.slice(index * width, (index + 1) * width));
  };
  return {
    features: rowsOf("support_features"),
    unadapted: tensors.unadapted_features ? rowsOf("unadapted_features") : null,
    labels,
    groups: tensors.support_groups ? integersOf(tensors.support_groups) : [...labels.keys()],
    negatives: rowsOf("negative_features"),
    unadaptedNegatives: tensors.unadapted_features ? rowsOf("unadapted_negatives") : null,
  };
}
