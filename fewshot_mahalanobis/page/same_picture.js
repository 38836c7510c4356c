// Which pictures are the same again, compressed, mirrored or slightly cropped: what `images/same_picture.py` computes,
// with its names and in float64. How, and why, is explained there.
"use strict";

const SIDE = 48, DISAGREEMENT = 0.01, COLOUR = 0.04, NEAREST = 3, CORRELATION = 0.5, COARSE_DISAGREEMENT = 0.4;
const CORRELATED_SIDE = 8, COARSE_SIDE = 16, COARSE_STEPS = 4, FINE_STEPS = 3, MOST_SCALE = 1.18, MOST_SHIFT = 0.2;
const ROUNDING = 1.5 / 255, BRIGHTNESS = [0.299, 0.587, 0.114];

const sum = values => values.reduce((total, value) => total + value, 0);
const clamped = (value, low, high) => Math.min(Math.max(value, low), high);

function dot(one, other) {
  let total = 0;
  for (let i = 0; i < one.length; i++) total += one[i] * other[i];
  return total;
}

function normalised(x) {
  const length = Math.max(Math.sqrt(dot(x, x)), 1e-12);
  return x.map(value => value / length);
}

/** Pairs of the same picture, the smaller index first, among pictures (3, 48, 48) of 8 bits with these features. */
export function samePictures(pictures, features) {
  if (pictures.length < 2) return [];
  const coarse = pictures.map(picture => shrunk(Float64Array.from(picture, value => value / 255), SIDE, COARSE_SIDE));
  const views = alike(coarse.map(one => shrunk(one, COARSE_SIDE, CORRELATED_SIDE)), features.map(normalised));
  const grey = coarse.map(brightness), pairs = new Map();
  for (const [i, j, mirrored] of views) {
    if (isSame(pictures, grey, i, j, mirrored)) pairs.set(`${i} ${j}`, [i, j]);
  }
  return [...pairs.values()];
}

/** Pairs of a picture and its nearest that look alike, and whether so if one is mirrored. */
function alike(tiny, features) {
  const centred = tiny.map(picture => {
    const part = CORRELATED_SIDE ** 2;
    const means = [0, 1, 2].map(channel => sum(picture.subarray(channel * part, (channel + 1) * part)) / part);
    return picture.map((value, index) => value - means[Math.floor(index / part)]);
  });
  const direction = picture => normalised(Float64Array.from([...picture, ROUNDING]));
  const own = centred.map(direction), theirs = centred.map(one => direction(mirrorImage(one, CORRELATED_SIDE)));
  const views = new Map();
  own.forEach((one, i) => {
    const as = own.map((other, j) => [dot(one, other), dot(one, theirs[j])]);
    const similarity = as.map((both, j) => i === j ? -Infinity : Math.max(...both) + dot(features[i], features[j]));
    const order = [...similarity.keys()].filter(j => j !== i).sort((a, b) => similarity[b] - similarity[a]);
    for (const j of order.slice(0, NEAREST)) {
      const pair = [Math.min(i, j), Math.max(i, j)];
      as[j].forEach((correlation, mirrored) => {
        if (correlation > CORRELATION) views.set(`${pair} ${mirrored}`, [...pair, mirrored === 1]);
      });
    }
  });
  return views.values();
}

/** Whether two pictures are the same, the first of them mirrored or not. */
function isSame(pictures, grey, i, j, mirrored) {
  const first = mirrored ? mirrorImage(grey[i], COARSE_SIDE) : grey[i];
  const placed = aligned(first, grey[j], [1, 1, 0, 0], COARSE_STEPS, COARSE_SIDE);
  const coarse = moved(grey[j], placed, COARSE_SIDE);
  if (!(disagreement(first, coarse.values, coarse.inside, COARSE_SIDE) <= COARSE_DISAGREEMENT)) return false;
  const [a, b] = [mirrored ? mirrorImage(pictures[i], SIDE) : pictures[i], pictures[j]].map(blurred);
  const finely = aligned(brightness(a), brightness(b), placed, FINE_STEPS, SIDE);
  const {values, inside} = moved(b, finely, SIDE);
  const area = sum(inside), part = SIDE ** 2;
  const colours = [0, 1, 2].map(channel => {
    let total = 0;
    for (let at = 0; at < part; at++) total += (a[channel * part + at] - values[channel * part + at]) * inside[at];
    return Math.abs(total / area);
  });
  const overlap = pooled(inside).map(share => +(share > 0.99));
  const edges = disagreement(pooled(brightness(a)), pooled(brightness(values)), overlap, COARSE_SIDE);
  return edges <= DISAGREEMENT && Math.max(...colours) <= COLOUR;
}

/** Move and scale a grey picture b to fit a, from scales and shifts along x and y on, by Gauss-Newton steps. */
function aligned(a, b, placed, steps, side) {
  for (let step = 0; step < steps; step++) {
    const {values, inside} = moved(b, placed, side);
    const square = [0, 1, 2, 3].map(() => [0, 0, 0, 0]), right = [0, 0, 0, 0];
    for (let y = 1; y < side - 1; y++) {
      for (let x = 1; x < side - 1; x++) {
        const at = y * side + x;
        if (!inside[at]) continue;
        const dx = (values[at + 1] - values[at - 1]) * side / 4 / placed[0];
        const dy = (values[at + side] - values[at - side]) * side / 4 / placed[1];
        const slopes = [dx * middle(x, side), dy * middle(y, side), dx, dy];
        for (let i = 0; i < 4; i++) {
          right[i] += slopes[i] * (a[at] - values[at]);
          for (let j = 0; j < 4; j++) square[i][j] += slopes[i] * slopes[j];
        }
      }
    }
    square.forEach((row, i) => { row[i] += 1e-3 * row[i] + 1e-6; });
    const change = solved(square, right);
    placed = placed.map((value, i) => {
      const next = value + clamped(change[i], -0.1, 0.1);
      return i < 2 ? clamped(next, 1 / MOST_SCALE, MOST_SCALE) : clamped(next, -MOST_SHIFT, MOST_SHIFT);
    });
  }
  return placed;
}

/** The solution of a system of equations, by elimination. */
function solved(square, right) {
  const rows = square.map((row, i) => [...row, right[i]]), n = rows.length;
  for (let i = 0; i < n; i++) {
    for (let j = i + 1; j < n; j++) {
      const factor = rows[j][i] / rows[i][i];
      for (let m = i; m <= n; m++) rows[j][m] -= factor * rows[i][m];
    }
  }
  const found = Array(n).fill(0);
  for (let i = n - 1; i >= 0; i--) {
    found[i] = (rows[i][n] - rows[i].slice(0, n).reduce((total, value, j) => total + value * found[j], 0)) / rows[i][i];
  }
  return found;
}

/** How far the edges of grey pictures disagree where they overlap, from 0 to 2. */
function disagreement(a, b, overlap, side) {
  let both = 4 * sum(overlap) * ROUNDING ** 2, each = both;
  for (const next of [1, side]) {
    for (let at = 0; at < a.length; at++) {
      if (next === 1 ? at % side === side - 1 : at + side >= a.length) continue;
      const within = overlap[at] * overlap[at + next], g = a[at + next] - a[at], h = b[at + next] - b[at];
      both += 2 * g * h * within;
      each += (g * g + h * h) * within;
    }
  }
  return 1 - both / each;
}

/** A picture at its place, and 1 where both it and the square have neighbours. */
function moved(b, [scaleX, scaleY, shiftX, shiftY], side) {
  const part = side * side, values = new Float64Array(b.length), inside = new Float64Array(part), border = 1 - 3 / side;
  const place = (scale, shift) => Array.from({length: side}, (_, index) => {
    const at = scale * middle(index, side) + shift, pixel = clamped(((at + 1) * side - 1) / 2, 0, side - 1);
    const first = Math.min(Math.floor(pixel), side - 2);
    return {first, rest: pixel - first, within: Math.abs(at) <= border && index > 0 && index < side - 1};
  });
  const columns = place(scaleX, shiftX), rows = place(scaleY, shiftY);
  rows.forEach((row, y) => columns.forEach((column, x) => {
    const from = row.first * side + column.first;
    for (let channel = 0; channel < b.length; channel += part) {
      const at = channel + from, upper = b[at] + column.rest * (b[at + 1] - b[at]);
      const lower = b[at + side] + column.rest * (b[at + side + 1] - b[at + side]);
      values[channel + y * side + x] = upper + row.rest * (lower - upper);
    }
    inside[y * side + x] = +(row.within && column.within);
  }));
  return {values, inside};
}

/** Of the middle of a pixel, from -1 to 1. */
const middle = (index, side) => (index + 0.5) * 2 / side - 1;

const mirrorImage = (picture, side) => picture.map((_, at) => picture[at - at % side + side - 1 - at % side]);

/** Planes (c, from, from) -> (c, to, to): weighted means under a triangle. */
function shrunk(planes, from, to) {
  const scale = from / to;
  const weights = Array.from({length: to}, (_, place) => {
    const distances = Float64Array.from({length: from}, (_, at) => Math.abs((at + 0.5) / scale - place - 0.5));
    const heights = distances.map(distance => Math.max(1 - distance, 0));
    const all = sum(heights);
    return heights.map(height => height / all);
  });
  const along = values => weights.map(weight => dot(weight, values));
  const found = [];
  for (let start = 0; start < planes.length; start += from * from) {
    const row = y => planes.subarray(start + y * from, start + (y + 1) * from);
    const rows = Array.from({length: from}, (_, y) => along(row(y)));
    const columns = Array.from({length: to}, (_, x) => along(rows.map(one => one[x])));
    for (let y = 0; y < to; y++) for (let x = 0; x < to; x++) found.push(columns[x][y]);
  }
  return Float64Array.from(found);
}

/** A picture (3, 48, 48) of 8 bits, smoothed by 1 2 1 along both axes. */
function blurred(picture) {
  const part = SIDE ** 2, near = index => clamped(index, 0, SIDE - 1);
  const smoothed = (values, step) => values.map((value, at) => {
    const index = step === 1 ? at % SIDE : Math.floor(at % part / SIDE), own = at - index * step;
    return (values[own + near(index - 1) * step] + 2 * value + values[own + near(index + 1) * step]) / 4;
  });
  return smoothed(smoothed(Float64Array.from(picture, value => value / 255), 1), SIDE);
}

function brightness(picture) {
  const part = picture.length / 3;
  return Float64Array.from({length: part}, (_, at) =>
    BRIGHTNESS[0] * picture[at] + BRIGHTNESS[1] * picture[part + at] + BRIGHTNESS[2] * picture[2 * part + at]);
}

/** Means of 3 x 3 pixels of a plane (48, 48). */
function pooled(plane) {
  const by = SIDE / COARSE_SIDE;
  return Float64Array.from({length: COARSE_SIDE ** 2}, (_, at) => {
    const top = Math.floor(at / COARSE_SIDE) * by, left = at % COARSE_SIDE * by;
    let total = 0;
    for (let y = top; y < top + by; y++) for (let x = left; x < left + by; x++) total += plane[y * SIDE + x];
    return total / by ** 2;
  });
}
