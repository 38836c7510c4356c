// How many pictures are enough: what `support_set/learning_curve.py` computes, with its names. The formulas are
// explained there. Draws are random here as there, but not the same ones.
"use strict";

const LEVEL = [2.5, 2], BETWEEN = 0.7, SLOPE = [2, 1];
const MAX_NUMBERS = 6, MAX_DRAWS = 8, MAX_IMAGES = 2000, QUANTILE = 1.96, SAMPLES = 1000, SURE = 0.8, MAX_MORE = 10;

const sum = values => values.reduce((total, value) => total + value, 0);
const sigmoid = eta => 1 / (1 + Math.exp(-eta));
const softplus = eta => Math.max(eta, 0) + Math.log1p(Math.exp(-Math.abs(eta)));
const largest = values => values.reduce((best, value, index) => value > values[best] ? index : best, 0);
const dot = (one, other) => one.reduce((total, value, index) => total + value * other[index], 0);
const times = (matrix, vector) => matrix.map(row => dot(row, vector));

/** Numbers in [0, 1), the same for each call (mulberry32). */
function randomNumbers(seed = 0) {
  return () => {
    seed = seed + 0x6d2b79f5 | 0;
    let mixed = Math.imul(seed ^ seed >>> 15, seed | 1);
    mixed ^= mixed + Math.imul(mixed ^ mixed >>> 7, mixed | 61);
    return ((mixed ^ mixed >>> 14) >>> 0) / 2 ** 32;
  };
}

/** 0..n-1 in random order (Fisher and Yates). */
function shuffled(n, random) {
  const order = [...Array(n).keys()];
  for (let i = n - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** The curve of a support set under a head's settings, or null if no class has two groups or there is one class.
 *
 *  `head` is the module head.mjs, `leftOut` the logits of left-out examples. `permutation` orders n sets for a draw,
 *  before which `pause` is waited for. */
export async function learningCurve(head, settings, {features, labels, groups}, leftOut, {permutation, pause} = {}) {
  const random = randomNumbers(), sets = new Sets(labels, groups), {counts} = sets, k = counts.length;
  const most = Math.max(...counts);
  if (most === 1 || k === 1) return null;
  const numbers = numbersUpTo(most - 1), draw = permutation ?? (n => shuffled(n, random));
  const stay = numbers.map(m => counts.map(count => Math.min(Math.max(count - 1, 1), m))); // of each class
  const draws = Math.max(1, Math.min(MAX_DRAWS, Math.floor(MAX_IMAGES / labels.length)));
  const tallies = [];
  for (const ofClasses of stay.slice(0, -1)) {
    const total = tally([], [], k);
    for (let i = 0; i < draws; i++) {
      await pause?.();
      const {drawn, rest} = sets.draw(ofClasses, draw(sets.classOf.length));
      if (!rest.length) continue;
      const of = (values, rows) => rows.map(row => values[row]);
      const plda = new head.Plda(of(features, drawn), of(labels, drawn), settings, of(groups, drawn));
      const found = tally(rest.map(row => plda.logits(features[row])), of(labels, rest), k);
      for (const part of ["right", "all"]) found[part].forEach((number, label) => { total[part][label] += number; });
    }
    tallies.push(total);
  }
  const paired = [...labels.keys()].filter(index => counts[labels[index]] > 1);
  tallies.push(tally(paired.map(index => leftOut[index]), paired.map(index => labels[index]), k));
  const shares = tallies.map(({right, all}) => right.map((number, label) => number / Math.max(all[label], 1)));
  const weights = tallies.map(({all}) => all.map((number, label) => (number > 0) * counts[label] / numbers.length));
  const images = tallies.map(({all}) => all.map((number, label) => (number > 0) * tallies.at(-1).all[label]));
  const measured = numbers.map((m, i) => [m, dot(shares[i], images[i]) / sum(images[i])]);
  const fit = fitted(head, shares, stay.map(row => row.map(m => 1 / Math.sqrt(m))), weights);
  return described(head, counts, measured, fit, random);
}

/** The examples of each class that are left out together: sets, each of one class and one group. */
class Sets {
  constructor(labels, groups) {
    const keys = labels.map((label, index) => [label, groups[index]]), key = ([label, group]) => `${label} ${group}`;
    const all = new Map(keys.map(one => [key(one), one]));
    const inOrder = [...all.values()].sort(([a, c], [b, d]) => a - b || c - d);
    const place = new Map(inOrder.map((one, index) => [key(one), index]));
    this.groups = groups;
    this.setOf = keys.map(one => place.get(key(one)));
    this.classOf = inOrder.map(([label]) => label);
    this.counts = Array(Math.max(...labels) + 1).fill(0);
    for (const label of this.classOf) this.counts[label]++;
  }

  /** Rows of the first `stay` sets of each class in an order of the sets, and of all that are in no group of these. */
  draw(stay, order) {
    const seen = this.counts.map(() => 0), chosen = new Set();
    for (const set of order) if (seen[this.classOf[set]]++ < stay[this.classOf[set]]) chosen.add(set);
    const rows = [...this.setOf.keys()], drawn = rows.filter(row => chosen.has(this.setOf[row]));
    const taken = new Set(drawn.map(row => this.groups[row]));
    return {drawn, rest: rows.filter(row => !taken.has(this.groups[row]))};
  }
}

/** Images a class that stay: 1 to `most`, the smaller ones closer together if they are many. */
function numbersUpTo(most) {
  if (most <= MAX_NUMBERS) return Array.from({length: most}, (_, index) => index + 1);
  const steps = Array.from({length: MAX_NUMBERS}, (_, i) => Math.round(most ** (i / (MAX_NUMBERS - 1))));
  return [...new Set(steps)];
}

/** Images of each class that are classified right, and all. */
function tally(logits, labels, k) {
  const right = Array(k).fill(0), all = Array(k).fill(0);
  logits.forEach((row, index) => {
    all[labels[index]]++;
    right[labels[index]] += largest(row) === labels[index];
  });
  return {right, all};
}

/** Mode (k + 1) of the a_k and b, and the Hessian there, by Newton's steps on a convex loss. */
function fitted(head, shares, decay, weights) {
  const k = shares[0].length, places = [...Array(k + 1).keys()];
  const centre = places.map(i => i < k ? LEVEL[0] : SLOPE[0]);
  const precision = inverse(head, places.map(i => places.map(j => i < k && j < k
    ? LEVEL[1] ** 2 + (i === j) * BETWEEN ** 2 : (i === j) * SLOPE[1] ** 2)));
  const each = visit => shares.forEach((row, m) => row.forEach((share, label) =>
    visit(share, decay[m][label], weights[m][label], label)));
  const loss = theta => {
    const off = theta.map((value, i) => value - centre[i]);
    let total = dot(off, times(precision, off)) / 2;
    each((share, d, weight, label) => {
      const eta = theta[label] - theta[k] * d;
      total -= weight * (share * eta - softplus(eta));
    });
    return total;
  };
  const derivatives = theta => {
    const slope = times(precision, theta.map((value, i) => value - centre[i]));
    const hessian = precision.map(row => Float64Array.from(row));
    each((share, d, weight, label) => {
      const p = sigmoid(theta[label] - theta[k] * d), residual = weight * (p - share), spread = weight * p * (1 - p);
      slope[label] += residual;
      slope[k] -= residual * d;
      hessian[label][label] += spread;
      hessian[label][k] -= spread * d;
      hessian[k][label] = hessian[label][k];
      hessian[k][k] += spread * d * d;
    });
    return {slope, hessian};
  };
  let mode = centre, at = loss(mode);
  for (;;) {
    const {slope, hessian} = derivatives(mode), covariance = inverse(head, hessian), step = times(covariance, slope);
    if (dot(step, slope) < 1e-14) return {mode, hessian, covariance};
    for (let length = 1; length > 1e-8; length /= 2) {
      const next = mode.map((value, i) => value - length * step[i]), there = loss(next);
      if (there < at) {
        [mode, at] = [next, there];
        break;
      }
      if (length <= 2e-8) return {mode, hessian, covariance}; // nothing but rounding is left
    }
  }
}

/** Of a positive definite matrix. */
function inverse(head, matrix) {
  const root = inverseRoot(head, matrix), columns = matrix.map((_, j) => root.map(row => row[j]));
  return columns.map(one => Float64Array.from(columns, other => dot(one, other)));
}

/** What the page says of the curve. */
function described(head, counts, measured, {mode, hessian, covariance}, random) {
  const usual = [...counts].sort((one, other) => one - other)[Math.floor((counts.length - 1) / 2)];
  const now = expected(counts, mode, covariance, 0), more = [];
  for (let extra = 1; extra <= usual; extra++) more.push(expected(counts, mode, covariance, extra));
  const little = more.at(-1).accuracy - now.accuracy < 0.01;
  return {counts, measured, usual, now, more, little, mostUseful: mostUseful(head, counts, mode, hessian, random)};
}

/** Accuracy on new images, mean over classes, with `more` support images of every class, and its 95 % interval. */
function expected(counts, mode, covariance, more) {
  const k = counts.length, decay = counts.map(count => 1 / Math.sqrt(count + more));
  const shares = decay.map((d, label) => sigmoid(mode[label] - mode[k] * d)), accuracy = sum(shares) / k;
  const slope = shares.map(share => share * (1 - share) / k / (accuracy * (1 - accuracy)));
  const gradient = [...slope, -dot(slope, decay)]; // of the accuracy's log-odds
  const half = QUANTILE * Math.sqrt(dot(gradient, times(covariance, gradient)));
  const [low, high] = [-1, 1].map(side => sigmoid(Math.log(accuracy / (1 - accuracy)) + side * half));
  return {accuracy, low, high};
}

/** The class of which more images would raise the accuracy over all classes most, how many, and whether it is sure. */
function mostUseful(head, counts, mode, hessian, random) {
  const k = counts.length;
  const gain = (theta, shots, more) => shots.map((count, label) =>
    sigmoid(theta[label] - theta[k] / Math.sqrt(count + more)) - sigmoid(theta[label] - theta[k] / Math.sqrt(count)));
  const leader = largest(gain(mode, counts, 1));
  let more = 1;
  const added = () => counts.map((count, label) => count + more * (label === leader));
  while (more < MAX_MORE && largest(gain(mode, added(), 1)) === leader) more++;
  // Samples of the normal approximation: mode + L^-T noise, for the Hessian L L^T.
  const root = inverseRoot(head, hessian);
  let first = 0;
  for (let i = 0; i < SAMPLES; i++) {
    const noise = mode.map(() => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random()));
    const theta = mode.map((value, j) => value + root.reduce((total, row, m) => total + row[j] * noise[m], 0));
    first += largest(gain(theta, counts, more)) === leader;
  }
  return {label: leader, images: more, sure: first / SAMPLES >= SURE};
}

/** L^-1 of a positive definite matrix L L^T. */
function inverseRoot(head, matrix) {
  return head.solved(head.cholesky(matrix), matrix.map((_, i) => Float64Array.from(matrix, (_, j) => +(i === j))));
}
