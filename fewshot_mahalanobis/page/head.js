// The default head in JavaScript: what `gaussians/plda.py`, `gaussians/temperature.py`, and in `support_set/`
// `calibration.py`, `unknown.py`, `negatives.py`, `copies.py` and `priors.py` compute, with their names, in float64. The
// formulas are explained there.
//
// Features are arrays of n Float64Arrays of length d, labels arrays of n integers 0..k-1, groups arrays of n integers;
// examples of equal number are left out together.
"use strict";

const BETA_PRIOR = {candidates: [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0], centre: 1.0, spread: 0.35};
const ONE_SHOT_CENTRE = 1.5, ONE_SHOT_SPREAD = 0.1, ONE_SHOT_SCALE = 14.0;
const SHARE_PRIOR = {candidates: [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], centre: 0.0, spread: 0.2}, CLASS_EXAMPLES = 5;
const MIN_SPREAD = 1e-2, MAX_SPREAD = 1e4, MAX_LEFT_OUT = 250, POWER_CLASSES = 10, PSEUDO_EXAMPLES = 0.25;
const DOUBT_UNIT = 0.25; // of the distance from the threshold, in standard deviations of left-out scores
const FEATURE_TERMS = ["adapted_cosine", "centred_cosine", "pretrained_cosine"]; // of the outlier score
const WEIGHTS = {head: 1.0, adapted_cosine: 1.0, centred_cosine: 1.0, pretrained_cosine: 2.0, negatives: 3.0}; // w_j
const MIN_ROUNDINGS = 2 ** 10, LARGEST_T = 10;
const TWIN_SHARE = 0.8, MOST_OF_CLASS = 1000;

// ---------------------------------------------------------------- vectors and matrices, as arrays of rows

const sum = values => values.reduce((total, value) => total + value, 0);
const unique = values => [...new Set(values)].sort((one, other) => one - other);
const matrix = (rows, columns) => Array.from({length: rows}, () => new Float64Array(columns));
const scaled = (x, factors) => x.map((value, index) => value * factors[index]);

/** In four sums, which a processor adds at a time. */
function dot(one, other) {
  const n = one.length, whole = n - n % 4;
  let a = 0, b = 0, c = 0, d = 0;
  for (let i = 0; i < whole; i += 4) {
    a += one[i] * other[i];
    b += one[i + 1] * other[i + 1];
    c += one[i + 2] * other[i + 2];
    d += one[i + 3] * other[i + 3];
  }
  for (let i = whole; i < n; i++) a += one[i] * other[i];
  return a + b + (c + d);
}

/** y += factor * x */
function add(y, x, factor = 1) {
  for (let i = 0; i < y.length; i++) y[i] += factor * x[i];
  return y;
}

const difference = (one, other) => add(Float64Array.from(one), other, -1);
const products = (one, other) => one.map(row => Float64Array.from(other, column => dot(row, column))); // one other^T

/** x x^T, of which half is computed. */
function gramOf(x) {
  const gram = matrix(x.length, x.length);
  for (let i = 0; i < x.length; i++) for (let j = 0; j <= i; j++) gram[i][j] = gram[j][i] = dot(x[i], x[j]);
  return gram;
}

/** The first row plus the mean difference from it: exact for equal rows. */
function mean(rows) {
  const total = new Float64Array(rows[0].length);
  for (const row of rows) add(total, difference(row, rows[0]));
  return total.map((value, index) => rows[0][index] + value / rows.length);
}

/** Mean over the features of their variances, unbiased. */
function meanVariance(x) {
  if (x.length < 2) return 0;
  const centre = mean(x);
  return sum(x.map(row => squaredLength(difference(row, centre)))) / (x.length - 1) / centre.length;
}

const squaredLength = x => dot(x, x);

function maximum(values) {
  let largest = -Infinity;
  for (const value of values) if (value > largest) largest = value;
  return largest;
}

function normalised(x) {
  const length = Math.max(Math.sqrt(squaredLength(x)), 1e-12);
  return x.map(value => value / length);
}

/** The lower L of L L^T = a, refused where a pivot is mostly rounding. */
export function cholesky(a) {
  const lower = matrix(a.length, a.length);
  for (let i = 0; i < a.length; i++) {
    for (let j = 0; j <= i; j++) {
      let rest = a[i][j];
      for (let m = 0; m < j; m++) rest -= lower[i][m] * lower[j][m];
      if (i !== j) lower[i][j] = rest / lower[j][j];
      else if (rest > MIN_ROUNDINGS * Number.EPSILON) lower[i][i] = Math.sqrt(rest);
      else throw new Error("a support example outweighs the others so far that its removal is lost to rounding");
    }
  }
  return lower;
}

/** L^-1 b, by rows. */
export function solved(lower, b) {
  const x = b.map(row => Float64Array.from(row));
  for (let i = 0; i < x.length; i++) {
    for (let m = 0; m < i; m++) add(x[i], x[m], -lower[i][m]);
    for (let j = 0; j < x[i].length; j++) x[i][j] /= lower[i][i];
  }
  return x;
}

/** Eigenvalues of a symmetric matrix and its eigenvectors as rows, in any order. Householder's reflections make it
 *  tridiagonal, QL steps with Wilkinson's shift diagonal (Golub & Van Loan, Matrix Computations, section 8.3). */
function eigh(symmetric) {
  const n = symmetric.length, a = symmetric.map(row => Float64Array.from(row)), vectors = matrix(n, n);
  vectors.forEach((row, index) => { row[index] = 1; });
  for (let k = 0; k < n - 2; k++) reflect(a, vectors, k);
  const values = Float64Array.from(a, (row, index) => row[index]);
  const beside = Float64Array.from(a, (row, index) => index + 1 < n ? a[index + 1][index] : 0);
  for (let first = 0; first < n; first++) {
    for (let last; (last = blockEnd(values, beside, first)) > first;) qlStep(values, beside, vectors, first, last);
  }
  return {values, vectors};
}

/** Make column k of `a` zero below the entry beside the diagonal. Earlier rows and columns are, and stay, so. */
function reflect(a, vectors, k) {
  const rest = a.slice(k).map(row => row.subarray(k)), turned = vectors.slice(k);
  const u = Float64Array.from(rest, (row, i) => i > 0 ? row[0] : 0), length = Math.sqrt(squaredLength(u));
  u[1] += u[1] > 0 ? length : -length;
  const half = squaredLength(u) / 2;
  if (half === 0) return;
  const w = Float64Array.from(rest, row => dot(row, u) / half);
  add(w, u, -dot(w, u) / (2 * half));
  const along = new Float64Array(a.length);
  rest.forEach((row, i) => {
    add(row, w, -u[i]);
    add(row, u, -w[i]);
    add(along, turned[i], u[i] / half);
  });
  turned.forEach((row, i) => add(row, along, -u[i]));
}

/** The last row of the block that begins at `first` and has no zero beside the diagonal. */
function blockEnd(values, beside, first) {
  let last = first;
  while (last + 1 < values.length) {
    if (Math.abs(beside[last]) <= Number.EPSILON * (Math.abs(values[last]) + Math.abs(values[last + 1]))) break;
    last++;
  }
  return last;
}

/** One implicit QL step on the block of rows first..last. */
function qlStep(values, beside, vectors, first, last) {
  const slope = (values[first + 1] - values[first]) / (2 * beside[first]);
  const root = Math.sqrt(slope * slope + 1);
  let bulge = values[last] - values[first] + beside[first] / (slope + (slope < 0 ? -root : root));
  let sine = 1, cosine = 1, moved = 0;
  for (let i = last - 1; i >= first; i--) {
    const far = sine * beside[i], near = cosine * beside[i], length = Math.sqrt(far * far + bulge * bulge);
    beside[i + 1] = length;
    if (length === 0) { // the block falls apart
      values[i + 1] -= moved;
      beside[last] = 0;
      return;
    }
    sine = far / length;
    cosine = bulge / length;
    const at = values[i + 1] - moved, turned = (values[i] - at) * sine + 2 * cosine * near;
    moved = sine * turned;
    values[i + 1] = at + moved;
    bulge = cosine * turned - near;
    const upper = vectors[i], lower = vectors[i + 1];
    for (let j = 0; j < upper.length; j++) {
      const old = lower[j];
      lower[j] = sine * upper[j] + cosine * old;
      upper[j] = cosine * upper[j] - sine * old;
    }
  }
  values[first] -= moved;
  beside[first] = bulge;
  beside[last] = 0;
}

// ---------------------------------------------------------------- the support set (gaussians/support.py)

function bincount(labels, weights) {
  const counts = new Float64Array(maximum(labels) + 1);
  labels.forEach((label, index) => { counts[label] += weights ? weights[index] : 1; });
  return counts;
}

function classMeans(x, labels) {
  const rows = [];
  x.forEach((row, index) => (rows[labels[index]] ??= []).push(row));
  return rows.map(mean);
}

/** The examples of each group. */
function members(groups) {
  const found = new Map();
  groups.forEach((group, index) => found.has(group) ? found.get(group).push(index) : found.set(group, [index]));
  return [...found.values()];
}

/** Of each example's class and group: how many examples it has. */
function sizesOfParts(labels, groups) {
  const key = index => `${labels[index]} ${groups[index]}`, sizes = new Map();
  labels.forEach((_, index) => sizes.set(key(index), (sizes.get(key(index)) ?? 0) + 1));
  return labels.map((_, index) => sizes.get(key(index)));
}

function remainingExamples(labels, groups) {
  const counts = bincount(labels), sizes = sizesOfParts(labels, groups);
  return labels.map((label, index) => counts[label] - sizes[index]);
}

/** Independent examples (Kish) that the mean of a class is worth, and that of its examples outside a group. */
function effectiveCounts(labels, groups) {
  const counts = bincount(labels), sizes = sizesOfParts(labels, groups), squares = bincount(labels, sizes);
  return {
    ofClasses: counts.map((count, label) => count * count / squares[label]),
    withoutGroups: labels.map((label, index) => {
      const remaining = counts[label] - sizes[index];
      return remaining * remaining / Math.max(squares[label] - sizes[index] ** 2, 1);
    }),
  };
}

/** How many left-out examples each example counts as: every group counts as one. */
function leftOutWeights(labels, groups) {
  const counted = remainingExamples(labels, groups).map(number => number > 0), sizes = new Map();
  groups.forEach((group, index) => sizes.set(group, (sizes.get(group) ?? 0) + counted[index]));
  return groups.map((group, index) => counted[index] ? 1 / sizes.get(group) : 0);
}

// ---------------------------------------------------------------- the model (gaussians/plda.py)

/** sign(x) |x|^power of each entry. */
function toPower(x, power) {
  if (power === 1) return x;
  return x.map(row => row.map(value => Math.sign(value) * Math.abs(value) ** power));
}

/** s_k = n_k b / (n_k b + 1) and r_k = 1 + 1 / (n_k + 1 / b). */
function shrinkage(count, spread) {
  return {shrink: count * spread / (count * spread + 1), ratio: 1 + 1 / (count + 1 / spread)};
}

/** V^T V of n rows V by its eigenvalues that are not 0 and coordinates along its eigenvectors. */
class Scatter {
  constructor(rows) {
    this.rows = rows;
    this.thin = rows.length < rows[0].length;
    const columns = () => Array.from(rows[0], (_, j) => Float64Array.from(rows, row => row[j]));
    const sides = this.thin ? rows : columns();
    const {values, vectors} = eigh(gramOf(sides));
    const positive = [...values.keys()].filter(index => values[index] > 1e-12 * maximum(values));
    this.eigenvalues = Float64Array.from(positive, index => values[index]);
    this.roots = this.eigenvalues.map(Math.sqrt);
    this.vectors = positive.map(index => vectors[index]);
  }

  /** The rows' own coordinates. */
  ofRows() {
    if (!this.thin) return products(this.rows, this.vectors);
    return this.rows.map((_, index) => this.roots.map((root, j) => root * this.vectors[j][index]));
  }

  /** Coordinates of a vector: the basis is V^T vectors / roots, which is never formed. */
  of(z) {
    if (!this.thin) return Float64Array.from(this.vectors, vector => dot(vector, z));
    const along = Float64Array.from(this.rows, row => dot(row, z));
    return this.roots.map((root, j) => dot(this.vectors[j], along) / root);
  }

  /** Eigenvalues of (S + beta I)^-1, S with this divisor and zero without any. */
  inverse(beta, divisor) {
    return this.eigenvalues.map(value => divisor > 0 ? 1 / (value / divisor + beta) : 1 / beta);
  }
}

/** The model fitted to a support set. */
export class Plda {
  constructor(features, labels, settings, groups) {
    const x = toPower(features, settings.power), means = classMeans(x, labels), within = settings.shared === "within";
    this.settings = settings;
    this.centre = mean(x);
    this.scatter = new Scatter(x.map((row, index) => difference(row, within ? means[labels[index]] : this.centre)));
    this.inverse = this.scatter.inverse(settings.beta, Math.max(x.length - (within ? means.length : 1), 1));
    this.means = means.map(row => difference(row, this.centre));
    this.along = this.means.map(row => this.scatter.of(row));
    this.toCentre = this.squaredDistance(mean(this.means));
    const counts = effectiveCounts(labels, groups).ofClasses;
    this.shrinkage = Array.from(counts, count => shrinkage(count, settings.spread));
  }

  /** Squared Mahalanobis distances (k) of a centred query to the class means. */
  squaredDistance(z) {
    const along = this.scatter.of(z);
    return Float64Array.from(this.means, (row, k) => {
      const inside = difference(along, this.along[k]), outside = squaredLength(difference(z, row)) - squaredLength(inside);
      return dot(scaled(inside, this.inverse), inside) + Math.max(outside, 0) / this.settings.beta;
    });
  }

  /** Logits (k) of a query: -d_k^2 / r_k - f log r_k, times the scale. */
  logits(query) {
    const {power, scale, freedom} = this.settings;
    const toMeans = this.squaredDistance(difference(toPower([query], power)[0], this.centre));
    const toCentre = (sum(toMeans) - sum(this.toCentre)) / toMeans.length; // of the query
    return toMeans.map((distance, k) => {
      const {shrink, ratio} = this.shrinkage[k];
      const squared = (1 - shrink) * toCentre + shrink * distance - shrink * (1 - shrink) * this.toCentre[k];
      return -scale * (squared / ratio + freedom * Math.log(ratio));
    });
  }
}

/** Choose all settings of the model on a support set. */
export function choosePldaSettings(features, labels, groups) {
  const variance = meanVariance(features), unit = variance || 1;
  if (variance === 0 || maximum(remainingExamples(labels, groups)) === 0) {
    return {beta: unit * 10 ** ONE_SHOT_CENTRE, spread: ONE_SHOT_SPREAD, freedom: 0, scale: ONE_SHOT_SCALE,
      shared: "task", power: 1};
  }
  if (maximum(labels) === 0) return atCentre(unit, 1);
  const power = features.every(row => row.every(value => value >= 0)) ? chosenPower(features, labels, groups) : 1;
  const likelihood = new Likelihood(features, labels, groups, power), ofPower = meanVariance(toPower(features, power));
  const start = atCentre(ofPower, power);
  const fits = BETA_PRIOR.candidates.map(exponent =>
    likelihood.fitted({...start, beta: ofPower * 10 ** exponent}).loss * likelihood.examples);
  const settings = {...start, beta: ofPower * 10 ** posteriorMean(BETA_PRIOR, fits)};
  const worth = effectiveCounts(labels, groups).ofClasses;
  if (worth.every(count => count === worth[0])) return likelihood.fitted(settings).settings;
  const losses = SHARE_PRIOR.candidates.map(share => likelihood.classLoss(settings, share) * CLASS_EXAMPLES);
  return likelihood.fitted(settings, posteriorMean(SHARE_PRIOR, losses)).settings;
}

/** Settings with beta at the centre of its prior, for features of this mean variance. */
function atCentre(variance, power) {
  return {beta: variance * 10 ** BETA_PRIOR.centre, spread: ONE_SHOT_SPREAD, freedom: 0, scale: 1, shared: "within",
    power};
}

/** Mean of the candidates of a normal prior under the posterior, by the loss of each. */
function posteriorMean({candidates, centre, spread}, losses) {
  const logs = candidates.map((candidate, index) => -losses[index] - ((candidate - centre) / spread) ** 2 / 2);
  const largest = maximum(logs), weights = logs.map(log => Math.exp(log - largest));
  return dot(weights, candidates) / sum(weights);
}

/** 1, or 1/2 where the left-out examples are more likely so. */
function chosenPower(features, labels, groups) {
  const counts = bincount(labels), order = [...counts.keys()].sort((one, other) => counts[other] - counts[one]);
  const classes = order.slice(0, POWER_CLASSES).sort((one, other) => one - other);
  const few = [...labels.keys()].filter(index => classes.includes(labels[index]));
  const fewLabels = few.map(index => classes.indexOf(labels[index])), fewGroups = few.map(index => groups[index]);
  if (maximum(remainingExamples(fewLabels, fewGroups)) === 0) return 1;
  const x = few.map(index => features[index]);
  const [loss, lossOfRoots] = [1, 0.5].map(power => {
    const settings = atCentre(meanVariance(toPower(x, power)), power);
    return new Likelihood(x, fewLabels, fewGroups, power).fitted(settings).loss;
  });
  return lossOfRoots < loss ? 0.5 : 1;
}

/** The leave-one-out likelihood of settings, by examples from all classes of which something remains. */
class Likelihood {
  constructor(features, labels, groups, power) {
    this.leftOut = withoutGroups(features, labels, groups, power);
    const remaining = remainingExamples(labels, groups);
    const order = [...labels.keys()].sort((one, other) => labels[one] - labels[other] || one - other)
      .filter(index => remaining[index] > 0);
    const all = [...new Set(order.map(index => groups[index]))], step = Math.max(1, Math.ceil(all.length / MAX_LEFT_OUT));
    const chosen = new Set(all.filter((_, index) => index % step === 0)); // whole groups
    this.rows = order.filter(index => chosen.has(groups[index]));
    this.chosen = this.leftOut.groups.filter(group => chosen.has(groups[group.rows[0]]));
    this.labels = this.rows.map(index => labels[index]);
    const weights = leftOutWeights(labels, groups);
    this.weights = this.rows.map(index => weights[index]);
    this.examples = sum(this.weights);
  }

  /** Settings with f, b and the scale that suit their beta, and the leave-one-out loss per example. */
  fitted(settings, share = 0) {
    const {distance, spread} = this.leftOut.moments(settings.beta);
    const moved = {...settings, freedom: share * distance, spread, scale: 1};
    const logits = this.logits(moved), smoothing = PSEUDO_EXAMPLES / logits[0].length;
    const {temperature, loss} = temperatureFit(logits, this.labels, smoothing, this.weights);
    return {settings: {...moved, scale: 1 / temperature}, loss};
  }

  /** Sum over classes of the mean leave-one-out loss of their examples. */
  classLoss(settings, share) {
    const logits = this.logits(this.fitted(settings, share).settings), ofClasses = bincount(this.labels, this.weights);
    return sum(this.labels.map((label, index) =>
      -this.weights[index] * logSoftmax(logits[index])[label] / ofClasses[label]));
  }

  logits(settings) {
    const found = this.leftOut.logits(settings, this.chosen);
    return this.rows.map(index => found[index]);
  }
}

const latest = new WeakMap(); // features -> what was last made of them, as it is needed several times

/** The model without each group of a support set. */
function withoutGroups(features, labels, groups, power) {
  const made = latest.get(features);
  if (made?.labels === labels && made.groups === groups && made.power === power) return made.model;
  const model = new PldaWithout(toPower(features, power), labels, groups);
  latest.set(features, {labels, groups, power, model});
  return model;
}

/** The model without each group of a support set, for any beta. */
class PldaWithout {
  constructor(x, labels, groups) {
    const means = classMeans(x, labels), centre = mean(means);
    const scatter = new Scatter(x.map((row, index) => difference(row, means[labels[index]])));
    const centred = means.map(row => difference(row, centre)); // M_j
    this.scatter = scatter;
    this.v = scatter.ofRows();
    this.means = centred.map(row => scatter.of(row));
    // Inner products of what of the M_j lies outside the span of the v_i, where P is beta I.
    const inside = products(this.means, this.means);
    this.outside = products(centred, centred).map((row, j) => difference(row, inside[j]));
    this.counts = bincount(labels);
    this.freedom = x.length - means.length; // n - k
    const {ofClasses, withoutGroups} = effectiveCounts(labels, groups);
    this.worth = ofClasses;
    this.worthOfOthers = withoutGroups;
    this.weights = leftOutWeights(labels, groups);
    this.groups = members(groups).map(rows => new Without(this, rows, labels));
  }

  /** Mean squared distance t of an example to its class mean, and spread b of the means, both less noise. */
  moments(beta) {
    let distance = 0;
    for (const group of this.groups) {
      group.ownDistances(beta).forEach((own, i) => {
        const row = group.rows[i];
        if (group.remaining[i] > 0) distance += this.weights[row] * own / (1 + 1 / this.worthOfOthers[row]);
      });
    }
    distance /= sum(this.weights);
    const k = this.means.length, {lengths} = this.classProducts(beta, this.freedom);
    const between = sum(lengths) / k * k / (k - 1), noise = distance * sum(this.worth.map(count => 1 / count)) / k;
    const spread = distance > 0 ? (between - noise) / distance : MAX_SPREAD;
    return {distance, spread: Math.min(Math.max(spread, MIN_SPREAD), MAX_SPREAD)};
  }

  /** Exact logits (n, k) of the examples of chosen groups; minus infinity where nothing remains. */
  logits(settings, chosen = this.groups) {
    const found = new Array(this.v.length);
    for (const group of chosen) group.logits(settings).forEach((row, i) => { found[group.rows[i]] = row; });
    return found;
  }

  /** Eigenvalues of (S + beta I)^-1 with a divisor of S, and under it M_y^T . M_j (k, k) and M_j^T . M_j (k). */
  classProducts(beta, divisor) {
    if (this.last?.beta !== beta) this.last = {beta, ofDivisors: new Map()};
    if (!this.last.ofDivisors.has(divisor)) {
      const inverse = this.scatter.inverse(beta, divisor);
      const weighted = this.means.map(row => scaled(row, inverse));
      const between = products(weighted, this.means).map((row, j) => add(row, this.outside[j], 1 / beta));
      this.last.ofDivisors.set(divisor, {inverse, between, lengths: between.map((row, j) => row[j])});
    }
    return this.last.ofDivisors.get(divisor);
  }
}

/** Inner products under P^-1 without a group of g members, as in `gaussians/plda.py`. */
class Without {
  constructor(parts, rows, labels) {
    this.parts = parts;
    this.rows = rows;
    this.labels = rows.map(row => labels[row]);
    const taken = bincount(this.labels), shots = this.labels.map(label => parts.counts[label]);
    this.remaining = this.labels.map((label, i) => shots[i] - taken[label]); // n_k - g_k
    const emptied = unique(this.labels).filter(label => taken[label] === parts.counts[label]).length;
    this.divisor = parts.freedom - rows.length + emptied;
    this.removed = this.divisor > 0 ? 1 / this.divisor : 0;
    this.v = rows.map(row => parts.v[row]);
    this.classes = Math.max(parts.counts.length - emptied, 1); // that remain
    this.inverseWeights = this.each((a, b) => // A^-1
      (a === b) - (this.labels[a] === this.labels[b] && this.remaining[a] > 0) / shots[a]);
    // Weights of the members' class means in minus the mean over the classes that remain.
    this.emptiedShares = emptied ? this.labels.map((label, a) => (this.remaining[a] === 0) / taken[label] / this.classes)
      : null;
    this.moveByClass();
  }

  /** A matrix (g, g). */
  each(entry) {
    return this.rows.map((_, a) => Float64Array.from(this.rows, (_, b) => entry(a, b)));
  }

  /** F (g, k) and H (g, g): m_j - c = N_j + sum_a f_aj v_a and x_i - c = N_y + sum_a h_ai v_a. */
  moveByClass() {
    const shares = this.remaining.map(number => (number > 0) / Math.max(number, 1));
    this.f = shares.map((share, a) => {
      const row = new Float64Array(this.parts.counts.length).fill(share / this.classes);
      row[this.labels[a]] -= share;
      return row;
    });
    this.h = this.each((a, i) => (a === i) + shares[a] / this.classes);
  }

  /** What inner products (g, m) with the v_i add under P without the group: to be squared and summed. */
  along(withMembers, gram) {
    if (!this.removed) return withMembers.map(row => new Float64Array(row.length));
    const rest = this.each((a, b) => this.inverseWeights[a][b] - this.removed * gram[a][b]); // A^-1 - V B^-1 V^T
    return solved(cholesky(rest), withMembers.map(row => row.map(value => Math.sqrt(this.removed) * value)));
  }

  /** Squared distances (g) of the members to the means of what remains of their classes. */
  ownDistances(beta) {
    const {inverse} = this.parts.classProducts(beta, this.divisor);
    const gram = products(this.v.map(row => scaled(row, inverse)), this.v);
    const moved = this.each((i, a) => // x less the mean, of v_a
      (i === a) + (this.labels[i] === this.labels[a]) / Math.max(this.remaining[i], 1));
    const ofMembers = products(gram, moved), along = this.along(ofMembers, gram);
    return this.rows.map((_, i) => sum(this.rows.map((_, a) => moved[i][a] * ofMembers[a][i] + along[a][i] ** 2)));
  }

  /** Logits (g, k) of the members; minus infinity where nothing remains. */
  logits({beta, spread, freedom, scale}) {
    const {parts, labels, f, h} = this, {inverse, between, lengths} = parts.classProducts(beta, this.divisor);
    const weighted = this.v.map(row => scaled(row, inverse));
    const gram = products(weighted, this.v); // v_a^T B^-1 v_b
    const vn = products(weighted, parts.means); // v_a^T B^-1 M_j
    const ny = labels.map(label => Float64Array.from(between[label])); // M_y^T B^-1 M_j of each member's class y
    const nn = Float64Array.from(lengths);
    if (this.emptiedShares) this.recentre(vn, ny, nn);
    const vy = this.each((a, i) => vn[a][labels[i]]);
    const vf = multiplied(gram, f), vh = multiplied(gram, h);
    const alongX = this.along(vy.map((row, a) => add(Float64Array.from(row), vh[a])), gram);
    const alongM = this.along(vn.map((row, a) => add(Float64Array.from(row), vf[a])), gram);
    const mm = nn.map((length, j) => {
      let total = length;
      for (let a = 0; a < f.length; a++) total += f[a][j] * (2 * vn[a][j] + vf[a][j]) + alongM[a][j] ** 2;
      return total;
    });
    return labels.map((label, i) => {
      let xx = ny[i][label];
      for (let a = 0; a < h.length; a++) xx += h[a][i] * (2 * vy[a][i] + vh[a][i]) + alongX[a][i] ** 2;
      return mm.map((length, j) => {
        const count = this.worth(j);
        if (count === 0) return -Infinity;
        let xm = ny[i][j];
        for (let a = 0; a < h.length; a++) {
          xm += h[a][i] * (vn[a][j] + vf[a][j]) + vy[a][i] * f[a][j] + alongX[a][i] * alongM[a][j];
        }
        const {shrink, ratio} = shrinkage(count, spread), distance = xx - 2 * shrink * xm + shrink ** 2 * length;
        return -scale * (distance / ratio + freedom * Math.log(ratio));
      });
    });
  }

  /** Put N_j, the M_j less their mean s over the classes that remain, in place of the M_j. */
  recentre(vn, ny, nn) {
    const {labels, emptiedShares: shares} = this; // s = -sum shares M
    const sn = nn.map((_, j) => -sum(shares.map((share, a) => share * ny[a][j]))); // s^T M_j
    const ss = -sum(shares.map((share, a) => share * sn[labels[a]]));
    vn.forEach(row => {
      const vs = sum(shares.map((share, a) => share * row[labels[a]]));
      row.forEach((_, j) => { row[j] += vs; });
    });
    ny.forEach((row, i) => row.forEach((_, j) => { row[j] += ss - sn[j] - sn[labels[i]]; }));
    nn.forEach((_, j) => { nn[j] += ss - 2 * sn[j]; });
  }

  /** Examples that what remains of a class is worth. */
  worth(label) {
    const member = this.labels.indexOf(label);
    return member < 0 ? this.parts.worth[label] : this.parts.worthOfOthers[this.rows[member]];
  }
}

/** The product of matrices (g, g) and (g, m). */
function multiplied(one, other) {
  return one.map(row => {
    const total = new Float64Array(other[0].length);
    row.forEach((factor, index) => add(total, other[index], factor));
    return total;
  });
}

/** Logits (n, k) of each support example by the head with the same settings fitted to the others (heads/auto.py). */
export function leaveOneOutLogits(settings, features, labels, groups) {
  if (settings.shared === "within" && maximum(bincount(labels)) > 1 && maximum(labels) > 0) {
    return withoutGroups(features, labels, groups, settings.power).logits(settings);
  }
  const k = maximum(labels) + 1, found = new Array(labels.length);
  for (const rows of members(groups)) {
    const rest = [...labels.keys()].filter(index => !rows.includes(index));
    const present = unique(rest.map(index => labels[index]));
    const plda = present.length ? new Plda(rest.map(index => features[index]),
      rest.map(index => present.indexOf(labels[index])), settings, rest.map(index => groups[index])) : null;
    for (const row of rows) {
      found[row] = new Float64Array(k).fill(-Infinity);
      plda?.logits(features[row]).forEach((logit, index) => { found[row][present[index]] = logit; });
    }
  }
  return found;
}

// ---------------------------------------------------------------- temperature (gaussians/temperature.py)

export function logSoftmax(logits) {
  const largest = maximum(logits), total = Math.log(sum(logits.map(logit => Math.exp(logit - largest))));
  return logits.map(logit => logit - largest - total);
}

/** Temperature under which softmax(logits / T) fits labels best, if that saves more than one nat, or 1. */
export function fitTemperature(logits, labels, weights) {
  const {temperature, gain} = temperatureFit(logits, labels, PSEUDO_EXAMPLES / logits[0].length, weights);
  return gain > 1 ? temperature : 1;
}

/** Fit a temperature with `smoothing` pseudo-examples of every class beside each example's own. */
function temperatureFit(logits, labels, smoothing, weights) {
  const rows = [...labels.keys()].filter(index => logits[index][labels[index]] > -Infinity);
  const n = sum(rows.map(index => weights[index]));
  const spreads = rows.map(index => {
    const present = logits[index].filter(logit => logit > -Infinity), centre = sum(present) / present.length;
    return Math.sqrt(sum(present.map(logit => (logit - centre) ** 2)) / (logits[index].length - 1));
  });
  const spread = logits[0].length > 1 ? sum(spreads) / rows.length : 0;
  const loss = logTemperature => {
    const unit = (spread || 1) * Math.exp(logTemperature);
    return -sum(rows.map(index => {
      const all = logSoftmax(logits[index].map(logit => logit / unit)), own = all[labels[index]];
      const logs = all.filter((_, label) => logits[index][label] > -Infinity);
      return weights[index] * (smoothing * sum(logs) + n * own) / (n + logs.length * smoothing);
    })) / n;
  };
  if (spread === 0) return {temperature: 1, loss: loss(0), gain: 0};
  const best = minimum(loss, -LARGEST_T, LARGEST_T);
  return {temperature: spread * Math.exp(best), loss: loss(best), gain: n * (loss(-Math.log(spread)) - loss(best))};
}

/** Where a function with one minimum between two numbers has it: golden section search. */
function minimum(f, low, high) {
  const golden = (Math.sqrt(5) - 1) / 2;
  let left = high - golden * (high - low), right = low + golden * (high - low), atLeft = f(left), atRight = f(right);
  while (high - low > 1e-7) {
    if (atLeft < atRight) {
      [high, right, atRight] = [right, left, atLeft];
      left = high - golden * (high - low);
      atLeft = f(left);
    } else {
      [low, left, atLeft] = [left, right, atRight];
      right = low + golden * (high - low);
      atRight = f(right);
    }
  }
  return (low + high) / 2;
}

// ---------------------------------------------------------------- rejection (support_set/unknown.py)

/** Cube roots of the features without adaptation: a few large ones no longer decide the cosine. */
const cubeRoots = x => x.map(row => row.map(Math.cbrt));

/** What each term of the outlier score but the head's compares. */
function termFeatures(adapted, pretrained) {
  return {adapted_cosine: adapted, centred_cosine: adapted, pretrained_cosine: cubeRoots(pretrained)};
}

/** The cosines of queries and class means, about zero or about the centre of the classes. */
class Cosines {
  constructor(name, means) {
    this.centre = name === "centred_cosine" ? mean(means) : new Float64Array(means[0].length);
    this.directions = means.map(row => normalised(difference(row, this.centre)));
  }

  of(query) {
    const direction = normalised(difference(query, this.centre));
    return Float64Array.from(this.directions, one => dot(one, direction));
  }
}

/** Cosines (n, k) of each support example and the classes without its group. */
function leaveOneOutCosines(name, x, labels, groups) {
  const counts = bincount(labels), means = classMeans(x, labels), found = new Array(x.length);
  for (const rows of members(groups)) {
    const taken = bincount(rows.map(row => labels[row])), moved = [...means];
    const present = [...means.keys()].filter(label => !(taken[label] >= counts[label]));
    for (const label of unique(rows.map(row => labels[row]))) {
      const total = means[label].map(value => value * counts[label]);
      rows.filter(row => labels[row] === label).forEach(row => add(total, x[row], -1));
      moved[label] = total.map(value => value / Math.max(counts[label] - taken[label], 1));
    }
    const cosines = present.length ? new Cosines(name, present.map(label => moved[label])) : null;
    for (const row of rows) {
      found[row] = new Float64Array(counts.length).fill(-Infinity);
      cosines?.of(x[row]).forEach((cosine, index) => { found[row][present[index]] = cosine; });
    }
  }
  return found;
}

/** The term that examples of no class add: by how much the nearest class is nearer to a query than the nearest of them
 *  (support_set/negatives.py). To the head each is a class, and a group, of its own. */
class Margins {
  /** `plda`: the model of the support set alone. */
  constructor(settings, {features, labels, groups, negatives}, plda) {
    const ways = maximum(labels) + 1, free = maximum(groups) + 1, own = [...negatives.keys()];
    this.settings = settings;
    this.ways = ways;
    this.examples = labels.length;
    this.both = [[...features, ...negatives], [...labels, ...own.map(index => ways + index)],
      [...groups, ...own.map(index => free + index)]];
    this.plda = new Plda(this.both[0], this.both[1], settings, this.both[2]);
    this.most = ways > 1 ? usualMargin(plda, features) : Infinity;
  }

  of(logits) {
    return maximum(logits.slice(0, this.ways)) - maximum(logits.slice(this.ways));
  }

  /** As it counts. */
  limited(margin) {
    return Math.min(margin, this.most);
  }

  ofQuery(query) {
    return this.limited(this.of(this.plda.logits(query)));
  }

  /** Of each support example and of each of no class, left out. */
  leaveOneOut() {
    return leaveOneOutLogits(this.settings, ...this.both).map(logits => this.of(logits));
  }
}

/** How much nearer the nearest class is than the next, at the lower median over examples. */
function usualMargin(plda, features) {
  const margins = features.map(query => {
    const [best, next] = plda.logits(query).sort((one, other) => other - one);
    return best - next;
  });
  return margins.sort((one, other) => one - other)[Math.floor((margins.length - 1) / 2)];
}

/** m_j and s_j / w_j of every term by its scores of left-out examples, as they count and without a limit. */
function scoreUnits(limited, scores, weights) {
  const n = sum(weights);
  return Object.fromEntries(Object.entries(scores).map(([name, ofExamples]) => {
    const centre = dot(weights, ofExamples) / n;
    const deviation = Math.sqrt(dot(weights, ofExamples.map(score => (score - centre) ** 2)) / (n - 1));
    const unit = deviation > 1e-6 * Math.abs(centre) ? deviation : 1;
    return [name, [dot(weights, limited[name]) / n, unit / WEIGHTS[name]]];
  }));
}

/** Score that a query of a known class exceeds with the promised probability. */
function rejectionThreshold(scores, falseRejectionRate, groups) {
  const order = [...scores.keys()].sort((one, other) => scores[one] - scores[other]), sizes = new Map();
  for (const group of groups) sizes.set(group, (sizes.get(group) ?? 0) + 1);
  const rank = (sizes.size + 1) * (1 - falseRejectionRate);
  let reached = 0;
  for (const [place, index] of order.entries()) {
    const next = reached + 1 / sizes.get(groups[index]);
    if (next >= rank) {
      if (place === 0) return scores[index];
      const below = scores[order[place - 1]];
      return below + (scores[index] - below) * (rank - reached) / (next - reached);
    }
    reached = next;
  }
  return scores[order.at(-1)];
}

/** Threshold from `least` to `most` that best separates examples of classes, with weights, from those of none. */
function separatingThreshold(scores, ofNone, weights, least, most) {
  const between = [...scores, ...ofNone].filter(score => score > least && score < most);
  const edges = [least, ...between, most].sort((one, other) => one - other), all = sum(weights);
  const middles = edges.slice(1).map((edge, index) => (edge + edges[index]) / 2);
  const losses = middles.map(middle => sum(weights.filter((_, index) => scores[index] > middle)) / all
    + ofNone.filter(score => score <= middle).length / ofNone.length);
  const lowest = Math.min(...losses) + 1e-9;
  return middles.findLast((_, index) => losses[index] <= lowest);
}

const standardisedSum = (scores, units) =>
  sum(Object.entries(units).map(([name, [centre, unit]]) => (scores[name] - centre) / unit));

// ---------------------------------------------------------------- all of it (support_set/fitted_head.py)

/** A head fitted to the features of a support set, calibrated.
 *
 *  `unadapted`, `groups`, `groupNames` and `negatives` (examples of no class) of a support set may be absent, and `priors` (shares of
 *  the classes with sum one, equal if null). Made by `FittedHead.fit`, or of what a file has: {settings, temperature,
 *  priors, outliers: null or {threshold, units}}; `fit` adds the spread of left-out scores to the outliers. */
export class FittedHead {
  constructor(support, {settings, temperature, priors = null, outliers}, plda = null, margins = null) {
    const whole = complete(support), {features, unadapted, labels, groups} = whole;
    Object.assign(this, {settings, temperature, priors, outliers});
    this.plda = plda ?? new Plda(features, labels, settings, groups);
    const compared = outliers?.units ? termFeatures(features, unadapted ?? features) : {};
    this.terms = FEATURE_TERMS.filter(name => outliers?.units?.[name])
      .map(name => [name, new Cosines(name, classMeans(compared[name], labels))]);
    this.margins = outliers?.units?.negatives ? margins ?? new Margins(settings, whole, this.plda) : null;
  }

  /** `reject`: whether queries may belong to no class. Null if they may not, and where no class has two groups.
   *  `twins`: whether near twins are left out together. */
  static fit(support, {temperature = 1, falseRejectionRate = 0.05, reject = false, priors = null, twins = false} = {}) {
    const whole = complete(support), {features, labels, negatives} = whole;
    const apart = twins ? {...whole, groups: withTwins(whole)} : whole;
    const settings = choosePldaSettings(features, labels, apart.groups);
    const plda = new Plda(features, labels, settings, apart.groups);
    const margins = reject && negatives?.length ? new Margins(settings, apart, plda) : null;
    const calibrated = calibrate(settings, apart, plda, margins, {temperature, falseRejectionRate, reject});
    const made = apart.groups === whole.groups ? [plda, margins] : [];
    return new FittedHead(whole, {settings, priors, ...calibrated}, ...made);
  }

  /** Logits (k), their probabilities, whether the query belongs to no class, and the doubt of the answer, of one query's
   *  features (d). */
  predict(adapted, unadapted = adapted) {
    const ofEqualPriors = this.plda.logits(adapted), score = this.outlierScore(ofEqualPriors, adapted, unadapted);
    const logits = this.priors === null ? ofEqualPriors
      : ofEqualPriors.map((logit, label) => logit + this.temperature * Math.log(this.priors[label]));
    const probabilities = logSoftmax(logits.map(logit => logit / this.temperature)).map(Math.exp);
    const unknown = this.outliers !== null && score > this.outliers.threshold;
    const doubt = this.doubt(probabilities, score, unknown);
    return {logits, probabilities, score, unknown, doubt, label: logits.indexOf(maximum(logits))};
  }

  /** Doubt of an answer (support_set/fitted_head.py); null of a file's head that rejects, which has no left-out scores. */
  doubt(probabilities, score, unknown) {
    const [first, second] = [...probabilities].sort((one, other) => other - one);
    const ofClasses = second === undefined ? 0 : 1 - (first - second);
    if (this.outliers === null) return ofClasses;
    const {threshold, spread} = this.outliers;
    if (spread === undefined) return null;
    const ofRejection = 2 / (1 + Math.exp(Math.abs(score - threshold) / (DOUBT_UNIT * spread)));
    return unknown ? ofRejection : Math.max(ofClasses, ofRejection);
  }

  /** Larger is farther from all classes. */
  outlierScore(logits, adapted, unadapted) {
    if (!this.outliers?.units) return -maximum(logits);
    const compared = termFeatures([adapted], [unadapted]), scores = {head: -maximum(logits)};
    for (const [name, cosines] of this.terms) scores[name] = -maximum(cosines.of(compared[name][0]));
    if (this.margins) scores.negatives = -this.margins.ofQuery(adapted);
    return standardisedSum(scores, this.outliers.units);
  }
}

/** A support set in which each example is a group of its own if it had no groups. */
const complete = support => ({...support, groups: support.groups ?? [...support.labels.keys()]});

/** Groups of a support set that keep near twins together as well (`near_twins` of support_set/copies.py), but for those
 *  that are both in groups that the user named. */
function withTwins({features, labels, groups, groupNames}) {
  const joined = new Map(), root = group => joined.has(group) ? root(joined.get(group)) : group;
  const isNamed = row => Boolean(groupNames) && groupNames[row] !== null;
  for (const [one, other] of nearTwins(features, labels)) {
    const [own, their] = [root(groups[one]), root(groups[other])];
    if (own !== their && !(isNamed(one) && isNamed(other))) joined.set(own, their);
  }
  return joined.size ? groups.map(root) : groups;
}

/** Pairs of examples that are implausibly near for their class: the chains of clusters of twins. */
function nearTwins(features, labels) {
  const directions = features.map(normalised), found = [];
  for (const label of unique(labels)) {
    const rows = [...labels.keys()].filter(row => labels[row] === label), n = rows.length, pairs = [];
    if (n < 4 || n > MOST_OF_CLASS) continue;
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < i; j++) {
        const [one, other] = [rows[i], rows[j]];
        pairs.push([Math.sqrt(squaredLength(difference(directions[one], directions[other]))), one, other]);
      }
    }
    const clusters = new Map(rows.map((row, number) => [row, {number, rows: [row], height: 0}]));
    let made = n;
    for (const [height, one, other] of pairs.sort((a, b) => a[0] - b[0])) {
      const joining = [clusters.get(one), clusters.get(other)];
      if (joining[0] === joining[1]) continue;
      for (const {rows: own, height: its} of joining) {
        if (own.length < 2 || 2 * own.length > n || !(its < TWIN_SHARE * height)) continue;
        for (let k = 1; k < own.length; k++) found.push([own[k - 1], own[k]]);
      }
      joining.sort((a, b) => a.number - b.number); // the order of a chain, as in Python
      const whole = {number: made++, rows: joining.flatMap(cluster => cluster.rows), height};
      for (const row of whole.rows) clusters.set(row, whole);
    }
  }
  return found;
}

/** Choose the temperature and, where queries may be rejected, the outlier score (support_set/calibration.py).
 *
 *  The head's own distances need no factor that puts left-out examples as far as queries: its model has r_k for that. */
function calibrate(settings, support, plda, margins, {temperature, falseRejectionRate, reject}) {
  const {features, unadapted, labels, groups} = support, weights = leftOutWeights(labels, groups);
  const fixed = temperature === "auto" ? 1 : temperature;
  const paired = [...labels.keys()].filter(index => weights[index] > 0);
  if (!paired.length || !(reject || temperature === "auto")) return {temperature: fixed, outliers: null};
  const of = rows => paired.map(index => rows[index]), own = of(labels), counted = of(weights);
  const logits = of(leaveOneOutLogits(settings, features, labels, groups));
  const chosen = temperature === "auto" ? fitTemperature(logits, own, counted) : fixed;
  if (!reject) return {temperature: chosen, outliers: null};
  const compared = termFeatures(features, unadapted ?? features);
  const scores = {head: logits.map(row => -maximum(row))};
  for (const name of FEATURE_TERMS) {
    scores[name] = of(leaveOneOutCosines(name, compared[name], labels, groups)).map(row => -maximum(row));
  }
  const limited = {...scores}, leftOut = margins?.leaveOneOut();
  if (margins) {
    const ofExamples = of(leftOut);
    scores.negatives = ofExamples.map(margin => -margin);
    limited.negatives = ofExamples.map(margin => -margins.limited(margin));
  }
  const units = scoreUnits(limited, scores, counted), n = sum(counted);
  // The units come from the left-out examples themselves: squared deviations are too small by (n - 1) / (n + 1).
  const sums = paired.map((_, index) =>
    standardisedSum(Object.fromEntries(Object.keys(limited).map(name => [name, limited[name][index]])), units)
    * Math.sqrt((n + 1) / (n - 1)));
  let threshold = rejectionThreshold(sums, falseRejectionRate, of(groups));
  if (margins) {
    const cosines = FEATURE_TERMS.map(name => [name, new Cosines(name, classMeans(compared[name], labels))]);
    const ofNone = support.negatives.map((negative, index) => {
      const own = termFeatures([negative], [support.unadaptedNegatives?.[index] ?? negative]);
      const found = Object.fromEntries(cosines.map(([name, cosine]) => [name, -maximum(cosine.of(own[name][0]))]));
      const head = -maximum(plda.logits(negative)), margin = margins.limited(leftOut[labels.length + index]);
      return standardisedSum({...found, head, negatives: -margin}, units);
    });
    const least = rejectionThreshold(sums, Math.min(2 * falseRejectionRate, 1), of(groups));
    threshold = separatingThreshold(sums, ofNone, counted, least, threshold);
  }
  const mean = sum(sums.map((score, index) => counted[index] * score)) / n;
  const spread = Math.sqrt(sum(sums.map((score, index) => counted[index] * (score - mean) ** 2)) / n) || 1;
  return {temperature: chosen, outliers: {threshold, units, spread}};
}
