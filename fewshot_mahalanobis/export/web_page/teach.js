// Teaches a classifier in this browser. The network adapts anew whenever the pictures change, as `fit` does. Until it
// has, the page answers by the adaptation of before, under which it learns a few new pictures at once, as `partial_fit`
// does.
"use strict";

const UNKNOWN = "unknown", FALSE_REJECTION_RATE = 0.05, SMALL = 84, TINY = 48;
const NONE = ""; // label of pictures that belong to none of the classes
const PATIENCE = 1000; // milliseconds after which the page says that it is learning
const FEW = 0.25; // share of the pictures that may be new if it is to learn under the adaptation of before

let classes = []; // names, in the order in which they were added
let shares = null; // how common each class is, by its name; null if nobody said so
let pictures = []; // {id, label, name, square, frozen, small, read}; to classify if the label is null
let start = null; // the fitted classifier that the page goes on from: {tensors, header}
let adaptation = null; // {key, film, features}: FiLM parameters, what they were made of, and features by pictures' ids
let learned = null; // {number, film, labels, priors, table, options, fitted}: what it answers by
let nextId = 1;
let model; // a file's tensors and header, of which those of the network are the page's own

const examples = () => pictures.filter(one => one.label);
const ofNone = () => pictures.filter(one => one.label === NONE);
const queries = () => pictures.filter(one => one.label === null);
const startLabels = () => start ? start.header.labels.classes : [];
const classNames = () => [...new Set([...startLabels(), ...classes])];
const codePoints = text => Array.from(text, letter => letter.codePointAt(0));
const folded = name => name.normalize("NFKC").toLowerCase();
const total = numbers => numbers.reduce((sum, number) => sum + number, 0);

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
  showClasses();
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
    setText(element("learning"), "");
  }
  if (learned) showCurve(learned);
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
      setText(element("learning"), `Adapting: picture ${index + 1} of ${missing.length}, about ${left} s to go.`
        + (learned ? " Until then answers are by the adaptation of before." : ""));
    }
    under.features.set(one.id, (await network(one.square, under.film)).features);
  }
  const {table, copies, contradictions} = await supportSet(support, labels, under);
  if (outdated()) return false;
  const options = calibration(table), priors = priorsOf(labels), number = nextFit++;
  if (labels.length < 2 && !options.reject) {
    learnNothing();
    return true;
  }
  const fitted = await ask({job: "fit", number, support: table, options: {...options, priors}});
  learned = {number, film: under.film, labels, priors, table, options, fitted, copies, contradictions};
  showLearned();
  await answerAll();
  return true;
}

let nextFit = 1;

function learnNothing() {
  learned = null;
  showLearned();
  return answerAll();
}

/** Features, labels and groups of what the page goes on from and of its own pictures, and examples of no class. */
async function supportSet(support, labels, {features}) {
  const table = {features: [], unadapted: [], labels: [], groups: [], negatives: [], unadaptedNegatives: []};
  if (start) {
    const {tensors, header} = start;
    Object.assign(table, supportOf(tensors));
    table.labels = table.labels.map(label => labels.indexOf(header.labels.classes[label]));
  }
  const first = table.labels.length, free = 1 + Math.max(-1, ...table.groups);
  for (const one of support) {
    table.features.push(Float64Array.from(features.get(one.id)));
    table.unadapted?.push(Float64Array.from(one.frozen));
    table.labels.push(labels.indexOf(one.label));
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
    asked.forEach(showQuery);
    if (asked.length && !teachable(examples())) say("Give two classes at least one picture each: then it answers.");
    return;
  }
  const by = learned;
  for (const query of asked) {
    if (query.answer?.by === by || !pictures.includes(query)) continue;
    query.answer = {...await decide(query.square, by, query.frozen), by};
    if (by !== learned) return; // the next round of learning answers them all
    showQuery(query);
  }
  const labels = queries().filter(one => one.answer).map(one => outputLabels()[one.answer.label]);
  say(labels.length ? summary(labels) : "Ready.");
}

// ---------------------------------------------------------------- pictures

/** Add files to a class, or as pictures to classify if `label` is null. */
async function addFiles(files, label) {
  await ready;
  const saved = files.find(file => file.name.endsWith(".safetensors"));
  if (saved) return openClassifier(saved);
  if (!files.length) return;
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
  if (unreadable.length) say(`${element("status").textContent} Not opened as a picture: ${unreadable.join(", ")}.`, true);
}

async function addPicture(picture, name, label) {
  const square = squareOf(picture, page.side);
  picture.source.close();
  const {features: frozen, small, read} = await network(square, identityFilm());
  const added = {id: nextId++, label, name, square, frozen, small, read};
  pictures.push(added);
  await storePicture(added).catch(error => {
    console.warn(error);
    setText(element("kept"), "This browser has no more space: save the classifier before you leave.");
  });
  if (label === null) showQuery(added);
}

async function removePicture(picture) {
  pictures = pictures.filter(one => one !== picture);
  await forgetPicture(picture.id);
  picture.card?.remove();
  element("asked").hidden = !queries().length;
  if (picture.label !== null) await changed();
}

async function addClass(name) {
  await ready;
  name = name.trim().normalize("NFC");
  const alike = classNames().find(one => folded(one) === folded(name));
  if (!name) return say("Give the class a name first.", true);
  if (folded(name) === UNKNOWN) return say(`“${UNKNOWN}” is the answer for pictures of no class: choose another name.`, true);
  if (alike) return say(`There is a class “${alike}” already.`, true);
  if (shares) await setShares({...shares, [name]: total(Object.values(shares)) / Math.max(classNames().length, 1)});
  classes.push(name);
  await storeState("classes", classes);
  element("name").value = "";
  say(`Now give “${name}” some pictures.`);
  showClasses();
}

async function removeClass(name) {
  for (const one of pictures.filter(picture => picture.label === name)) await forgetPicture(one.id);
  pictures = pictures.filter(picture => picture.label !== name);
  classes = classes.filter(one => one !== name);
  await storeState("classes", classes);
  if (shares) await setShares(Object.fromEntries(Object.entries(shares).filter(([one]) => one !== name)));
  element("name").focus();
  await changed();
}

/** How common each class is, by its name, or null. */
async function setShares(ofClasses) {
  shares = ofClasses;
  await storeState("shares", shares);
}

/** What a visitor writes into the field of a class. */
async function shareChanged(name, text) {
  const share = Number(text);
  if (!text.trim() || !(share >= 0 && share < Infinity)) {
    return say(`Give the share of “${name}” as a number that is 0 or more.`, true);
  }
  await setShares({...shares, [name]: share});
  await changed();
}

// ---------------------------------------------------------------- showing

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

/** Each class with its pictures, and those of none. Cards and pictures that are there stay, and so does the focus. */
function showClasses() {
  const names = classNames(), list = element("classes");
  const cards = new Map([...list.children].map(card => [card.dataset.name, card]));
  for (const [name, card] of cards) if (!names.includes(name)) card.remove();
  for (const name of names) {
    if (!cards.has(name)) list.append(classCard(name));
    showCard(cards.get(name) ?? list.lastElementChild, name);
  }
  if (!element("none").children.length) element("none").append(noneCard());
  showCard(element("none").firstElementChild, NONE);
  element("none").hidden = !names.length || start?.header.parameters.unknown_label === null;
  element("common").hidden = names.length < 2;
  element("shares").checked = shares !== null;
  const target = element("target"), chosen = target.value;
  const choices = [["Pictures to classify", ""], ...names.map(name => [name, `class ${name}`])];
  if (!element("none").hidden) choices.push(["None of these", "none"]);
  target.replaceChildren(...choices.map(([text, value]) => new Option(text, value)));
  target.value = [...target.options].some(option => option.value === chosen) ? chosen : "";
}

function showCard(card, name) {
  const own = pictures.filter(one => one.label === name), known = numberInStart(name), number = own.length + known;
  setText(card.querySelector(".count"), number === 1 ? "1 picture" : `${number} pictures`);
  card.querySelector(".remove").hidden = name === NONE || known > 0;
  card.querySelector(".share").hidden = name === NONE || !shares;
  const field = card.querySelector(".share input");
  if (shares && document.activeElement !== field) field.value = Number((shares[name] ?? 0).toPrecision(6));
  const place = card.querySelector(".taught"), shown = new Map([...place.children].map(one => [one.dataset.id, one]));
  for (const [id, one] of shown) if (!own.some(picture => String(picture.id) === id)) one.remove();
  for (const picture of own) if (!shown.has(String(picture.id))) place.append(thumbnail(picture));
}

/** How many pictures of a class, or of none, are known from the classifier that the page goes on from. */
function numberInStart(name) {
  if (!start) return 0;
  if (name === NONE) return start.tensors.negative_features?.shape[0] ?? 0;
  return integersOf(start.tensors.support_labels).filter(label => startLabels()[label] === name).length;
}

function classCard(name) {
  const card = fromTemplate("class"), [input, share] = ["file", "number"].map(type => card.querySelector(`[type=${type}]`));
  card.dataset.name = name;
  setText(card.querySelector("h3"), name);
  card.querySelector(".remove").setAttribute("aria-label", `Remove the class ${name}`);
  card.querySelector(".remove").addEventListener("click", () => removeClass(name));
  input.setAttribute("aria-label", `Pictures of ${name}`);
  share.setAttribute("aria-label", `Share of ${name}`);
  share.addEventListener("change", () => shareChanged(name, share.value));
  whenChosen(input, files => addFiles(files, name));
  return card;
}

/** Where pictures of none of the classes go. */
function noneCard() {
  const card = classCard(NONE);
  setText(card.querySelector("h3"), "None of these");
  card.querySelector("[type=file]").setAttribute("aria-label", "Pictures of none of the classes");
  card.querySelector(".heading").after(textElement("p", "Pictures of other things that it will see, if there are "
    + "some: it learns better what is unknown."));
  return card;
}

function thumbnail(picture) {
  const item = document.createElement("li"), button = textElement("button", "×");
  item.dataset.id = picture.id;
  button.type = "button";
  button.setAttribute("aria-label", `Remove ${picture.name}`);
  button.addEventListener("click", () => removePicture(picture));
  const canvas = canvasOf(picture);
  canvas.style.width = canvas.style.height = `${SMALL}px`;
  item.append(canvas, button);
  return item;
}

/** How well it does on its own pictures. */
function showLearned() {
  element("save").disabled = element("save-page").disabled = !learned;
  element("enough").hidden = true; // until it is measured anew
  if (!learned) {
    return setText(element("figure"),
      "Two classes with a picture each are enough to begin, or two pictures of one class.");
  }
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
  setText(element("figure"), said.join(" "));
}

/** Whether more pictures would help. */
async function showCurve(by) {
  const curve = await ask({job: "curve", number: by.number}).catch(error => console.warn(error));
  if (by !== learned) return;
  element("enough").hidden = !curve;
  if (!curve) return;
  const {usual, now, more, little, mostUseful: {label, images, sure}} = curve, name = by.labels[label];
  const range = ({accuracy, low, high}) => `${percent(accuracy)} (${percent(low)} to ${percent(high)})`;
  setText(element("advice"), little
    ? `More pictures would bring little: ${usual} more of each class, less than 1 point.`
    : sure ? `About ${images} more ${images === 1 ? "picture" : "pictures"} of ${name} should help most.`
      : `More pictures may help, of ${name} first, but which class needs them most is uncertain.`);
  setText(element("expected"),
    `Expected on new ones: ${range(now)}, and with ${usual} more of each class ${range(more.at(-1))}.`);
  drawCurve(curve);
}

/** The accuracy by the number of pictures of each class: measured, and dashed what is expected, with its interval. */
function drawCurve({counts, measured, now, more}) {
  const last = Math.max(...counts), expected = [now, ...more].map((one, extra) => [last + extra, one]);
  const points = pairs => pairs.map(([m, share]) =>
    `${30 + 180 * (m - 1) / (last + more.length - 1)},${90 - 80 * share}`).join(" ");
  const set = (id, pairs) => element(id).setAttribute("points", points(pairs));
  set("measured-line", measured);
  set("expected-line", expected.map(([m, {accuracy}]) => [m, accuracy]));
  set("interval", [...expected.map(([m, {high}]) => [m, high]), ...expected.map(([m, {low}]) => [m, low]).reverse()]);
  setText(element("most"), `${last + more.length} of a class`);
}

function showQuery(query) {
  if (!query.card) {
    [query.card] = addCards([query.name]);
    query.card.querySelector("canvas").replaceWith(canvasOf(query));
    query.card.querySelector(".remove").setAttribute("aria-label", `Remove ${query.name}`);
    query.card.querySelector(".remove").addEventListener("click", () => removePicture(query));
  }
  query.card.querySelector("details").hidden = !query.answer;
  if (query.answer) return showAnswer(query.card, query.answer, outputLabels());
  setText(query.card.querySelector(".label"), "…");
  setText(query.card.querySelector(".text"), "");
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
      units: fitted.outliers?.units ?? null, group_names: null},
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
  if (!header.labels.classes.every(name => typeof name === "string")) throw new Error("Its classes are numbers.");
}

/** Forget everything that was taught. */
async function forget() {
  if (!confirm("Remove all classes and pictures?")) return;
  await forgetAll();
  await storeState("forgotten", true); // not what the page came with, either
  element("answers").replaceChildren();
  element("asked").hidden = true;
  [classes, pictures, shares, start, adaptation, learned] = [[], [], null, null, null, null];
  await changed();
  say("Everything is removed.");
}

// ---------------------------------------------------------------- the visitor

async function load() {
  const scripts = {headCode: "head.mjs", curveCode: "learning_curve.mjs", sameCode: "same_picture.mjs"};
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
  nextId = 1 + Math.max(0, ...pictures.map(one => one.id), ...(adaptation?.features.keys() ?? []));
  queries().forEach(showQuery);
  say("Ready.");
}

/** The page has another network than at the last visit: what is kept of the pictures is of that. */
async function renew() {
  for (const one of pictures) {
    const canvas = canvasOf(one);
    if (canvas.width !== page.side) one.square = squareOf(pictureOf(canvas, canvas.width, canvas.height), page.side);
    ({features: one.frozen, small: one.small, read: one.read} = await network(one.square, identityFilm()));
    await storePicture(one);
  }
  await storeState("network", page.features.integrity);
}

element("add").addEventListener("submit", event => {
  event.preventDefault();
  addClass(element("name").value);
});
whenChosen(element("files"), files => addFiles(files, null));
whenChosen(element("open"), files => addFiles(files, null));
whenDropped((files, place) => addFiles(files, place?.closest?.(".class")?.dataset.name ?? null));
offerCamera(async picture => {
  await ready;
  if (learned) showAnswer(element("live"), await decide(squareOf(picture, page.side), learned), outputLabels());
}, async ({picture, name}) => {
  await ready;
  const {value} = element("target");
  const label = value === "none" ? NONE : value.startsWith("class ") ? value.slice(6) : null;
  await addPicture(picture, name, label);
  await (label === null ? answerAll() : changed());
});
element("shares").addEventListener("change", async event => {
  await ready;
  const names = classNames(), equal = Object.fromEntries(names.map(name => [name, 100 / names.length]));
  await setShares(event.target.checked ? equal : null);
  await changed();
});
element("clear").addEventListener("click", async () => {
  for (const query of queries()) await removePicture(query);
  say("Ready.");
  element("files").focus();
});
for (const [id, give] of [["save", save], ["save-page", savePage]]) {
  element(id).addEventListener("click", () => give().catch(error => say(`It could not be saved: ${error.message}`, true)));
}
element("forget").addEventListener("click", forget);

const ready = load();
ready.then(changed).catch(error => say(error.message, true));
