// How many pictures are enough: what `support_set/learning_curve.py` computes, with its names. The formulas are
// explained there. Draws are random here as there, but not the same ones.
"use strict";

const MAX_NUMBERS = 6, MAX_DRAWS = 8, MAX_IMAGES = 2000, QUANTILE = 1.96, PRIOR_IMAGES = 20, PRIOR_WRONG = 4;
const SURE = 2, MAX_MORE = 10, LITTLE = 0.01, NARROW = 0.1;

const sum = values => values.reduce((total, value) => total + value, 0);
const mean = values => sum(values) / values.length;
const largest = values => values.reduce((best, value, index) => value > values[best] ? index : best, 0);
const dot = (one, other) => one.reduce((total, value, index) => total + value * other[index], 0);
const decay = counts => mean(counts.map(count => 1 / Math.sqrt(count)));

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
 *  `head` is the module head.js, `leftOut` the logits of left-out examples. `permutation` orders n sets for a draw,
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
  const images = tallies.map(({all}) => all.map((number, label) => (number > 0) * tallies.at(-1).all[label]));
  const measured = numbers.map((m, i) => [m, dot(shares[i], images[i]) / sum(images[i])]);
  return described(counts, measured, shares.at(-1));
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

/** What the page says of the curve, by the share of each class that is right with all but one. */
function described(counts, measured, shares) {
  const usual = [...counts].sort((one, other) => one - other)[Math.floor((counts.length - 1) / 2)];
  const leftOut = sum(counts.filter(count => count > 1)), line = fitted(counts, measured);
  const expected = extra => wilson(line(decay(counts.map(count => count + extra))), leftOut);
  const now = expected(0), more = Array.from({length: usual}, (_, extra) => expected(extra + 1));
  const little = more.at(-1).accuracy - now.accuracy < LITTLE, narrow = now.high - now.low <= NARROW;
  return {counts, measured, usual, leftOut, now, more, little, narrow, mostUseful: mostUseful(counts, shares)};
}

/** The line of least squares through what was measured and a point at which all is right. */
function fitted(counts, measured) {
  const x = [...measured.map(([m]) => decay(counts.map(count => Math.min(Math.max(count - 1, 1), m)))), 0];
  const y = [...measured.map(([, accuracy]) => accuracy), 1], [atX, atY] = [mean(x), mean(y)];
  const off = x.map(value => value - atX), slope = Math.min(dot(off, y) / dot(off, off), 0);
  return place => Math.min(atY + slope * (place - atX), 1);
}

/** Wilson's 95 % interval of an accuracy in so many trials. */
function wilson(accuracy, trials) {
  const ratio = QUANTILE ** 2 / trials, centre = accuracy + ratio / 2;
  const half = Math.sqrt(ratio * accuracy * (1 - accuracy) + ratio ** 2 / 4);
  return {accuracy, low: (centre - half) / (1 + ratio), high: (centre + half) / (1 + ratio)};
}

/** The class of which more images would raise the accuracy over all classes most, how many, and whether it is sure. */
function mostUseful(counts, shares) {
  const errors = counts.map((count, label) => {
    const images = count > 1 ? count : 0;
    return (images * (1 - shares[label]) + PRIOR_WRONG) / (images + PRIOR_IMAGES);
  });
  const needs = errors.map((error, label) => error / counts[label]), label = largest(needs);
  const second = Math.max(...needs.filter((_, other) => other !== label));
  const images = Math.min(Math.max(Math.ceil(errors[label] / second) - counts[label], 1), MAX_MORE);
  return {label, images, sure: needs[label] >= SURE * second};
}
