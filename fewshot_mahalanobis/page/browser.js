// The engine in the browser. The network adapts anew whenever the pictures change, as `fit` does. Until it has, the page
// answers by the adaptation of before, under which it learns a few new pictures at once, as `partial_fit` does.
// `learn.js` says what an engine is.
"use strict";

const UNKNOWN = "unknown", FALSE_REJECTION_RATE = 0.05, TINY = 48;
const NONE = ""; // label of pictures that belong to none of the classes
const PATIENCE = 1000; // milliseconds after which the page says that it is learning
const FEW = 0.25; // share of the pictures that may be new if it is to learn under the adaptation of before

let classes = []; // names, in the order in which they were added
let shares = null; // how common each class is, by its name; null if nobody said so
let pictures = []; // {id, label, name, square, frozen, small, read}; to classify if the label is null
let start = null; // the fitted classifier that the page goes on from: {tensors, header}
let adaptation = null; // {key, film, features}: FiLM parameters, what they were made of, and features by pictures' ids
let learned = null; // {number, film, labels, priors, table, options, fitted, copies, contradictions}: what it answers by
let curve = null; // of what it has learned
let progress = ""; // what it says while it learns
let nextId = 1;
let model; // a file's tensors and header, of which those of the network are the page's own
let shown; // to be called after every change
const changes = [], passed = []; // what each answer has replaced: {id: label}; pictures to be asked about later

const examples = () => pictures.filter(one => one.label);
const ofNone = () => pictures.filter(one => one.label === NONE);
const queries = () => pictures.filter(one => one.label === null);
const startLabels = () => start ? start.header.labels.classes : [];
const classNames = () => [...new Set([...startLabels(), ...classes])];
const codePoints = text => Array.from(text, letter => letter.codePointAt(0));
const folded = name => name.normalize("NFKC").toLowerCase();
const total = numbers => numbers.reduce((sum, number) => sum + number, 0);
const unknownLabel = () => start?.header.parameters.unknown_label ?? UNKNOWN;

/** The order of Python's strings: by code points. */
function inOrder(one, other) {
  const [a, b] = [codePoints(one), codePoints(other)];
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}

// ---------------------------------------------------------------- learning

/** FiLM parameters of a support set. */
async function adapted(support) {
  if (!page.film) return identityFilm();
  const joined = parts => {
    const all = new Float32Array(parts.length * parts[0].length);
    parts.forEach((part, index) => all.set(part, index * part.length));
    return all;
  };
  const n = support.length, small = joined(support.map(one => one.small)), read = joined(support.map(one => one.read));
  const side = Math.round(Math.sqrt(support[0].small.length / 3));
  const inputs = {images: ["float32", small, [n, 3, side, side]], read: ["float32", read, [n, read.length / n]]};
  return (await ask({job: "run", graph: "film", inputs}, [small.buffer, read.buffer])).film;
}

let version = 0, seen = 0, learning = null, reading = 0; // how often the pictures have changed; files being read

/** The pictures have changed: learn from them, and from those that change meanwhile. */
function changed() {
  version++;
  shown();
  return learnIfChanged();
}

/** Learn, once no more pictures are being read. */
async function learnIfChanged() {
  if (!reading && seen !== version) learning ??= learn().finally(() => { learning = null; });
  await learning;
}

async function learn() {
  while (seen !== version) {
    seen = version;
    try {
      await learnFrom(examples(), () => seen !== version);
    } catch (error) {
      say(`It could not learn from these pictures: ${error.message}`, true);
    }
    progress = "";
    shown();
  }
  if (learned) findCurve(learned);
}

/** Are there two classes, or enough pictures of one to tell it from everything else? */
const teachable = support => start !== null || new Set(support.map(one => one.label)).size > 1 || support.length > 1;

async function learnFrom(support, outdated) {
  const labels = [...new Set([...startLabels(), ...support.map(one => one.label)])].sort(inOrder);
  if (!teachable(support)) return learnNothing();
  const key = start ? "start" : support.map(one => one.id).join();
  let under = adaptation;
  if (under && under.key !== key) {
    const added = support.filter(one => !under.features.has(one.id)).length;
    if (added <= FEW * support.length && !await learnUnder(under, support, labels, outdated)) return;
  }
  if (under?.key !== key) {
    const film = start ? filmOf(start.tensors) : await adapted(support);
    under = {key, film, features: new Map()};
  }
  if (!await learnUnder(under, support, labels, outdated)) return;
  adaptation = under;
  const here = new Set(pictures.map(one => one.id));
  for (const id of under.features.keys()) if (!here.has(id)) under.features.delete(id);
  await storeState("adaptation", under).catch(error => console.warn("the next visit adapts anew:", error));
}

/** Learn under an adaptation, whose features are computed where they are missing; false if the pictures change. */
async function learnUnder(under, support, labels, outdated) {
  const began = performance.now(), missing = [...support, ...ofNone()].filter(one => !under.features.has(one.id));
  for (const [index, one] of missing.entries()) {
    if (outdated()) return false;
    const spent = performance.now() - began;
    if (spent > PATIENCE) {
      const left = Math.ceil(spent / index * (missing.length - index) / 1000);
      progress = `Adapting: picture ${index + 1} of ${missing.length}, about ${left} s to go.`
        + (learned ? " Until then answers are by the adaptation of before." : "");
      shown();
    }
    under.features.set(one.id, one.seen?.film === under.film ? one.seen.features
      : (await network(one.square, under.film)).features);
  }
  const {table, copies, contradictions} = await supportSet(support, labels, under);
  if (outdated()) return false;
  const options = calibration(table), priors = priorsOf(labels), number = nextFit++;
  if (labels.length < 2 && !options.reject) {
    learnNothing();
    return true;
  }
  const fitted = await ask({job: "fit", number, support: table, options: {...options, priors}});
  const own = support.map(one => one.id);
  learned = {number, film: under.film, labels, own, priors, table, options, fitted, copies, contradictions};
  curve = null; // until it is measured anew
  shown();
  await answerAll();
  return true;
}

let nextFit = 1;

function learnNothing() {
  learned = curve = null;
  return answerAll();
}

/** Features, labels and groups of what the page goes on from and of its own pictures, and examples of no class. */
async function supportSet(support, labels, {features}) {
  const table = {features: [], unadapted: [], labels: [], groups: [], groupNames: [], negatives: [], unadaptedNegatives: []};
  if (start) {
    const {tensors, header} = start;
    Object.assign(table, supportOf(tensors));
    table.labels = table.labels.map(label => labels.indexOf(header.labels.classes[label]));
    table.groupNames = [...header.fitted.group_names ?? table.labels.map(() => null)];
  }
  const first = table.labels.length, free = 1 + Math.max(-1, ...table.groups);
  for (const one of support) {
    table.features.push(Float64Array.from(features.get(one.id)));
    table.unadapted?.push(Float64Array.from(one.frozen));
    table.labels.push(labels.indexOf(one.label));
    table.groupNames.push(null);
  }
  for (const one of ofNone()) {
    if (!features.has(one.id)) continue; // it has come meanwhile
    table.negatives.push(Float64Array.from(features.get(one.id)));
    table.unadaptedNegatives?.push(Float64Array.from(one.frozen));
  }
  if (!adapts()) table.unadapted = table.unadaptedNegatives = null;
  const tiny = support.map(one => one.tiny ??= tinyPicture(one.square));
  const pairs = await ask({job: "copies", pictures: tiny, features: table.features.slice(first)});
  const own = [...support.keys()], group = index => own[index] === index ? index : group(own[index]);
  const contradictions = [];
  for (const [i, j] of pairs) {
    if (support[i].label === support[j].label) own[group(j)] = group(i);
    else contradictions.push([support[i], support[j]]);
  }
  table.groups.push(...support.map((_, index) => free + group(index)));
  return {table, copies: support.length - new Set(support.map((_, index) => group(index))).size, contradictions};
}

/** A square as small as pictures are compared. */
function tinyPicture(square) {
  return resized(resized(square, 3 * page.side, page.side, 1, TINY), 3, page.side, TINY, TINY);
}

const adapts = () => start ? Object.keys(start.tensors).some(name => name.startsWith("film.")) : Boolean(page.film);

/** As the app calibrates, or as the classifier that the page goes on from. */
function calibration({labels, groups}) {
  const parts = new Map();
  labels.forEach((label, index) => parts.set(label, (parts.get(label) ?? new Set()).add(groups[index])));
  const paired = labels.filter(label => parts.get(label).size > 1).length;
  if (start) {
    const {temperature, unknown_label: unknown, false_rejection_rate: falseRejectionRate} = start.header.parameters;
    return {temperature, falseRejectionRate, unknown, reject: unknown !== null && paired > 0};
  }
  const falseRejectionRate = Math.max(FALSE_REJECTION_RATE, 1 / (paired + 1));
  return {temperature: 1, falseRejectionRate, unknown: paired ? UNKNOWN : null, reject: paired > 0};
}

/** The share of each class among the pictures that it will be asked about, with sum one; null if all are as common. */
function priorsOf(labels) {
  if (!shares) return null;
  const own = labels.map(label => shares[label]), sum = total(own);
  if (sum === 0) throw new Error("every class has the share 0; give one of them more.");
  return own.map(share => share / sum);
}

// ---------------------------------------------------------------- answers

const outputLabels = () => [...learned.labels, learned.options.unknown ?? ""];

async function answerAll() {
  const asked = queries();
  if (!learned) {
    for (const query of asked) query.answer = null;
    shown();
    if (asked.length && !teachable(examples())) say("Give two classes at least one picture each: then it answers.");
    return;
  }
  const by = learned;
  for (const query of asked) {
    if (query.answer?.by === by || !pictures.includes(query)) continue;
    query.seen = query.seen?.film === by.film ? query.seen : {film: by.film, features: await featuresOf(query.square, by)};
    const answer = {...await decide(query.square, by, query.frozen, query.seen.features), by};
    if (by !== learned) return; // the next round of learning answers them all
    query.answer = {...answer, ...inWords(answer, by.labels)};
    shown();
  }
  const labels = queries().filter(one => one.answer).map(one => outputLabels()[one.answer.label]);
  say(labels.length ? summary(labels) : "Ready.");
}

/** An answer as the page shows it. */
function inWords({probabilities, label, score, threshold, doubt}, labels) {
  const order = [...probabilities.keys()].sort((one, other) => probabilities[other] - probabilities[one]);
  return {best: order.slice(0, KEYS).map(index => [labels[index], probabilities[index]]),
    unknown: label === probabilities.length, score, threshold, doubt};
}

/** The curve of what was learned, which takes a while. */
async function findCurve(by) {
  const found = await ask({job: "curve", number: by.number}).catch(error => console.warn(error));
  if (by !== learned || !found) return;
  curve = {...found, advice: advice(found, by.labels)};
  shown();
}

function advice({usual, leftOut, now, little, narrow, mostUseful: {label, images, sure}}, labels) {
  if (little && narrow) return `More pictures would bring little: ${usual} more of each class, less than 1 point.`;
  if (little) {
    return `More pictures may bring little, but ${leftOut} are too few to tell: the accuracy is ${inRange(now)}.`;
  }
  return sure ? `About ${images} more ${images === 1 ? "picture" : "pictures"} of ${labels[label]} should help most.`
    : `More pictures may help, of ${labels[label]} first, but which class needs them most is uncertain.`;
}

/** The picture whose label would teach most; those that were passed over come last. */
async function nextPicture() {
  const fresh = queries().filter(one => !passed.includes(one.id));
  if (!fresh.length) return passed.find(id => queries().some(one => one.id === id)) ?? null;
  const answered = fresh.filter(one => one.answer), own = pictures.filter(one => one.label !== null);
  if (!answered.length) {
    const known = own.map(one => one.frozen);
    return fresh[await ask({job: "next", features: fresh.map(one => one.frozen), probabilities: null, known})].id;
  }
  const known = [...learned.table.features, ...learned.table.negatives, ...own.flatMap(one => one.seen?.features ?? [])];
  const features = answered.map(one => one.seen.features), probabilities = answered.map(one => one.answer.probabilities);
  return answered[await ask({job: "next", features, probabilities, known})].id;
}

// ---------------------------------------------------------------- pictures

/** Read files, each after the other, and take them in; those that are no pictures, by their names. */
async function readFiles(files, label) {
  const unreadable = [];
  reading++;
  for (const [index, file] of files.entries()) {
    say(files.length === 1 ? "Reading the picture …" : `Reading picture ${index + 1} of ${files.length} …`);
    try {
      await addPicture(await openPicture(file), file.name, label);
    } catch (error) {
      unreadable.push(file.name);
      console.warn(file.name, error);
    }
  }
  reading--;
  await (label === null ? Promise.all([answerAll(), learnIfChanged()]) : changed());
  return unreadable;
}

async function addPicture(picture, name, label) {
  const square = squareOf(picture, page.side);
  picture.source.close();
  const {features: frozen, small, read} = await network(square, identityFilm());
  const added = {id: nextId++, label, name, square, frozen, small, read};
  pictures.push(added);
  await keepPicture(added);
  shown();
}

async function keepPicture({id, label, name, square, frozen, small, read}) {
  await storePicture({id, label, name, square, frozen, small, read}).catch(error => {
    console.warn(error);
    setText(element("kept"), "This browser has no more space: save the classifier before you leave.");
  });
}

/** Give pictures other labels: {id: label}; what they had. */
async function relabel(labels) {
  const before = {};
  for (const one of pictures.filter(({id}) => id in labels && labels[id] !== undefined)) {
    if (one.label === labels[one.id]) continue;
    before[one.id] = one.label;
    one.label = labels[one.id];
    one.answer = null;
    if (one.label && !classNames().includes(one.label)) classes.push(one.label);
    await keepPicture(one);
  }
  await storeState("classes", classes);
  changed(); // learns meanwhile
  return before;
}

/** Is a name the answer for pictures of no class, however it is written? */
const isUnknown = name => [UNKNOWN, folded(unknownLabel())].includes(folded(name.trim()));

/** A name for a class, without white space around it; an error says why it cannot be one. */
function checkedName(name) {
  name = name.trim().normalize("NFC");
  if (!name) throw new Error("Give the class a name first.");
  if (isUnknown(name)) {
    throw new Error(`“${name}” is the answer for pictures of no class: choose another name.`);
  }
  const alike = classNames().find(one => folded(one) === folded(name));
  if (alike && alike !== name) throw new Error(`There is a class “${alike}”: write it like that, or choose another name.`);
  return name;
}

/** How common each class is, by its name, or null. */
async function setShares(ofClasses) {
  shares = ofClasses;
  await storeState("shares", shares);
}

/** How many pictures of a class, or of none, are known from the classifier that the page goes on from. */
function numberInStart(name) {
  if (!start) return 0;
  if (name === NONE) return start.tensors.negative_features?.shape[0] ?? 0;
  return integersOf(start.tensors.support_labels).filter(label => startLabels()[label] === name).length;
}

/** How well it does on its own pictures, in sentences. */
function sentences() {
  if (!learned) return ["Two classes with a picture each are enough to begin, or two pictures of one class."];
  const {fitted: {right, counted}, labels, copies, contradictions} = learned, said = [];
  if (labels.length === 1) said.push(`It tells “${labels[0]}” from everything else.`);
  else if (!counted) {
    said.push("Give each class a second picture: then it measures how well it does, and tells pictures of no class.");
  } else said.push(`Each left out in turn, ${right} of ${counted} pictures are recognised (${percent(right / counted)}).`);
  if (copies) {
    said.push(`${copies} of the pictures ${copies === 1 ? "is a copy of another" : "are copies of others"}, the same `
      + "again, compressed, mirrored or cropped: copies are left out together and count once.");
  }
  for (const [one, other] of contradictions.slice(0, 3)) {
    said.push(`${one.name} in “${one.label}” and ${other.name} in “${other.label}” are the same picture: remove one of `
      + "them.");
  }
  if (ofNone().length && !learned.options.reject) {
    said.push("Pictures of none of these count once a class has two pictures.");
  }
  return said;
}

/** The canvas of a picture's square. */
function canvasOf({square, name}) {
  const canvas = document.createElement("canvas"), side = Math.round(Math.sqrt(square.length / 3));
  const pixels = new ImageData(side, side);
  for (let i = 0; i < side * side; i++) {
    for (let channel = 0; channel < 3; channel++) pixels.data[4 * i + channel] = square[channel * side * side + i];
    pixels.data[4 * i + 3] = 255;
  }
  canvas.width = canvas.height = side;
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  return canvas;
}

// ---------------------------------------------------------------- files

/** The classifier as a file (Blob). */
async function classifierFile() {
  const {film, labels, priors, table, options, fitted} = learned;
  const width = table.features[0].length, n = table.labels.length;
  const tensors = Object.fromEntries(Object.entries(model.tensors).filter(([name]) => name.startsWith("model.")));
  const flat = rows => Float32Array.from(rows.flatMap(row => [...row]));
  let from = 0;
  if (adapts()) {
    for (const [position, maps] of page.positions) {
      for (const kind of ["gamma", "beta"]) {
        tensors[`film.${position}.${kind}`] = floatTensor(film.subarray(from, from += maps), [maps]);
      }
    }
  }
  tensors.support_features = floatTensor(flat(table.features), [n, width]);
  const compares = table.unadapted && options.unknown !== null, m = table.negatives.length;
  if (compares) tensors.unadapted_features = floatTensor(flat(table.unadapted), [n, width]);
  if (m && options.reject) {
    tensors.negative_features = floatTensor(flat(table.negatives), [m, width]);
    if (compares) tensors.unadapted_negatives = floatTensor(flat(table.unadaptedNegatives), [m, width]);
  }
  tensors.support_labels = integerTensor(table.labels);
  if (new Set(table.groups).size < n) tensors.support_groups = integerTensor(table.groups);
  const header = start?.header ?? model.header, rejects = fitted.outliers !== null;
  return writeClassifier(tensors, {
    ...header,
    parameters: {...header.parameters, temperature: options.temperature, unknown_label: rejects ? options.unknown : null,
      false_rejection_rate: options.falseRejectionRate},
    labels: {dtype: `<U${Math.max(...labels.map(label => codePoints(label).length))}`, classes: labels,
      allowed: allowedLabels(labels)},
    fitted: {...header.fitted, priors, settled: {name: "auto", settings: fitted.settings}, temperature: fitted.temperature,
      unknown_label: rejects ? options.unknown : null, threshold: fitted.outliers?.threshold ?? null,
      false_rejection_rate: options.falseRejectionRate,
      units: fitted.outliers?.units ?? null,
      group_names: table.groupNames.some(name => name !== null) ? table.groupNames : null},
  });
}

/** The labels that may occur, by what the page goes on from; null if any may. */
function allowedLabels(labels) {
  const allowed = start?.header.labels.allowed;
  return allowed ? [...new Set([...allowed, ...labels])].sort(inOrder) : null;
}

/** Give the visitor a file. */
function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const save = async () => download(await classifierFile(), "classifier.safetensors");

/** Give the visitor an answering page. */
async function savePage() {
  const {labels, table, fitted, options} = learned;
  const title = prompt("Heading of the page", "Picture classifier");
  if (title === null) return;
  const unknown = fitted.outliers ? options.unknown : null;
  say("Making the page …");
  const zip = await answeringPage(title, await classifierFile(), {labels, unknown, examples: table.labels.length});
  download(zip, "page.zip");
  say("The page is in page.zip: unpack it into a folder of a web server.");
}

/** Go on from a file that this page or Python wrote. */
async function openClassifier(file) {
  try {
    const bytes = await file.arrayBuffer(), opened = readClassifier(bytes);
    checkClassifier(opened);
    const own = [...examples(), ...ofNone()], question = `Put “${file.name}” in place of the classes and pictures here?`;
    if (own.length && !confirm(question)) return;
    changes.length = 0;
    for (const one of own) await forgetPicture(one.id);
    pictures = queries();
    [classes, start, adaptation] = [[], opened, null];
    await storeState("classes", classes);
    await storeState("adaptation", null);
    await storeState("start", bytes);
    await setShares(sharesOfStart());
    say(`Going on from “${file.name}”.`);
    await changed();
  } catch (error) {
    say(`${file.name} could not be opened. ${error.message}`, true);
  }
}

/** How common its classes are by the classifier that the page goes on from, in per cent. */
function sharesOfStart() {
  const {priors} = start.header.fitted;
  return priors && Object.fromEntries(priors.map((share, label) => [startLabels()[label], 100 * share]));
}

/** Raise an error unless a file's network is this page's, and its head the one that the page has. */
function checkClassifier({tensors, header}) {
  const own = Object.entries(model.tensors).filter(([name]) => name.startsWith("model."));
  const same = ({bytes: one}, {bytes: other}) => one.length === other.length && one.every((byte, i) => byte === other[i]);
  const settings = ({header: {model: config}}) => JSON.stringify(Object.entries(config).sort());
  const others = Object.keys(tensors).filter(name => name.startsWith("model.")).length !== own.length;
  if (others || settings({header}) !== settings(model) || !own.every(([name, one]) => tensors[name] && same(tensors[name], one))) {
    throw new Error("It was made with another checkpoint than this page.");
  }
  if (header.fitted.settled?.name !== "auto") throw new Error("This page has the head “auto” alone.");
  if (tensors.unlabelled_features) throw new Error("It learned from unlabelled pictures, which this page does not.");
  if (!header.labels.classes.every(name => typeof name === "string")) throw new Error("Its classes are numbers.");
}

// ---------------------------------------------------------------- loading

async function load() {
  const scripts = {headCode: "head.js", curveCode: "learning_curve.js", sameCode: "same_picture.js", nextCode: "which_next.js"};
  const codes = Object.fromEntries(Object.entries(scripts).map(([name, address]) => [name, {address}]));
  await loadPage(({features, film}) => ({...codes, features, ...(film ? {film} : {})}));
  model = readClassifier(await (await get(page.classifier)).arrayBuffer());
  const kept = await openStore();
  if (!kept) setText(element("kept"), "This browser keeps nothing: save the classifier before you leave.");
  const stored = await storedState("start");
  if (stored) start = readClassifier(stored);
  else if (page.goes_on && !await storedState("forgotten")) start = model;
  classes = await storedState("classes") ?? [];
  shares = await storedState("shares") ?? (start === model ? sharesOfStart() : null);
  pictures = await storedPictures();
  if (await storedState("network") === page.features.integrity) adaptation = await storedState("adaptation") ?? null;
  else await renew();
  element("example").hidden = false;
  nextId = 1 + Math.max(0, ...pictures.map(one => one.id), ...(adaptation?.features.keys() ?? []));
  say("Ready.");
}

/** The page has another network than at the last visit: what is kept of the pictures is of that. */
async function renew() {
  for (const one of pictures) {
    const canvas = canvasOf(one);
    if (canvas.width !== page.side) one.square = squareOf(pictureOf(canvas, canvas.width, canvas.height), page.side);
    ({features: one.frozen, small: one.small, read: one.read} = await network(one.square, identityFilm()));
    await keepPicture(one);
  }
  await storeState("network", page.features.integrity);
}

// ---------------------------------------------------------------- the engine

const engine = {
  async open(whenChanged) {
    shown = whenChanged;
    await load();
    changed(); // learns meanwhile
  },

  get state() {
    const counts = new Map(startLabels().map(name => [name, numberInStart(name)]));
    return {
      classes: classNames().map(name => ({name, known: counts.get(name) ?? 0, share: shares && (shares[name] ?? 0)})),
      none: {known: numberInStart(NONE), learned: start?.header.parameters.unknown_label !== null, answer: unknownLabel()},
      pictures, learned: learned !== null, sentences: sentences(), curve, progress, undo: changes.length > 0,
    };
  },

  async learn(files, label) {
    const saved = files.find(file => file.name.endsWith(".safetensors"));
    if (saved) return openClassifier(saved);
    const unreadable = files.length ? await readFiles(files, label) : [];
    if (unreadable.length) say(`${element("status").textContent} Not opened as a picture: ${unreadable.join(", ")}.`, true);
  },

  async keep({picture, name}, label) { // a frame of the camera
    await addPicture(picture, name, label);
    await (label === null ? answerAll() : changed());
  },

  async see(picture) {
    if (!learned) return null;
    return inWords(await decide(squareOf(picture, page.side), learned), learned.labels);
  },

  async addClass(name) {
    const alike = classNames().find(one => folded(one) === folded(name.trim()));
    if (alike) throw new Error(`There is a class “${alike}” already.`);
    name = checkedName(name);
    if (shares) await setShares({...shares, [name]: total(Object.values(shares)) / Math.max(classNames().length, 1)});
    classes.push(name);
    await storeState("classes", classes);
    shown();
  },

  async removeClass(name) {
    classes = classes.filter(one => one !== name);
    await storeState("classes", classes);
    if (shares) await setShares(Object.fromEntries(Object.entries(shares).filter(([one]) => one !== name)));
    await this.remove(pictures.filter(one => one.label === name).map(one => one.id));
  },

  async label(ids, label) {
    if (!ids.length) throw new Error("Select one or more pictures first.");
    if ((label === NONE || label && isUnknown(label)) && !this.state.none.learned) throw new Error("This classifier rejects nothing: it was made "
      + "without an unknown label.");
    const wanted = label && !isUnknown(label) ? checkedName(label) : label && NONE;
    const before = await relabel(Object.fromEntries(ids.map(id => [id, wanted])));
    if (Object.keys(before).length) changes.push(before);
  },

  async undo() {
    const before = changes.pop() ?? {};
    await relabel(before);
    return Object.keys(before).map(Number);
  },

  async skip(id) {
    passed.splice(0, passed.length, ...passed.filter(one => one !== id), id);
  },

  async remove(ids) {
    const gone = pictures.filter(one => ids.includes(one.id));
    pictures = pictures.filter(one => !ids.includes(one.id));
    for (const before of changes) for (const {id} of gone) delete before[id];
    changes.splice(0, changes.length, ...changes.filter(before => Object.keys(before).length));
    for (const {id} of gone) await forgetPicture(id);
    shown();
    if (gone.some(one => one.label !== null)) await changed();
  },

  /** Say how common some or all classes are: {name: share}, or null if all are as common. */
  async setShares(ofClasses) {
    await setShares(ofClasses && {...shares, ...ofClasses}); // the page may not have seen the last change yet
    await changed();
  },

  next: nextPicture,

  /** The pictures that taught and are nearest to another: their labels, and ids where the page has them. */
  async nearest(id) {
    const {seen, answer} = pictures.find(one => one.id === id), {features, labels} = answer.by.table;
    const square = row => row.reduce((sum, value, i) => sum + (value - seen.features[i]) ** 2, 0);
    const own = answer.by.own, first = features.length - own.length, distances = features.map(square);
    return [...features.keys()].sort((one, other) => distances[one] - distances[other]).slice(0, NEAREST).map(index =>
      ({label: answer.by.labels[labels[index]], id: own[index - first] ?? null}));
  },

  drawing: id => canvasOf(pictures.find(one => one.id === id)),
  large: id => canvasOf(pictures.find(one => one.id === id)),

  save: async () => download(await classifierFile(), "classifier.safetensors"),
  savePage,

  /** Pieces of photographs, which lie side by side in one file: examples of classes, and some to be asked about. */
  async example() {
    const row = await createImageBitmap(await (await get({address: "example.jpg"})).blob()), side = row.height;
    reading++; // it learns once all are there
    try {
      for (const [index, label] of page.example.entries()) {
        say(`Reading picture ${index + 1} of ${page.example.length} …`);
        if (label !== null && !classNames().includes(label)) await this.addClass(label);
        const piece = await createImageBitmap(row, index * side, 0, side, side);
        await addPicture(pictureOf(piece, side, side), `${label ?? "piece"} ${index + 1}`, label);
      }
    } finally {
      reading--;
      await changed();
    }
  },

  async forget() {
    await forgetAll();
    await storeState("forgotten", true); // not what the page came with, either
    [classes, pictures, shares, start, adaptation, learned, curve] = [[], [], null, null, null, null, null];
    changes.length = passed.length = 0;
    await changed();
    say("Everything is removed.");
  },
};
