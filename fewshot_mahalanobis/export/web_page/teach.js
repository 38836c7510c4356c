// Teaches a classifier in this browser. The network adapts anew whenever the pictures change, as `fit` does; until it has,
// the page answers by what it learned before.
"use strict";

const UNKNOWN = "unknown", FALSE_REJECTION_RATE = 0.05, SMALL = 84;
const PATIENCE = 1000; // milliseconds after which the page says that it is learning

let classes = []; // names, in the order in which they were added
let pictures = []; // {id, label, name, square, frozen, small}; to classify if the label is null
let start = null; // the fitted classifier that the page goes on from: {tensors, header}
let learned = null; // {number, film, labels, table, options, fitted}: what it answers by
let nextId = 1;
let model; // a file's tensors and header, of which those of the network are the page's own

const examples = () => pictures.filter(one => one.label !== null);
const queries = () => pictures.filter(one => one.label === null);
const codePoints = text => Array.from(text, letter => letter.codePointAt(0));
const folded = name => name.normalize("NFKC").toLowerCase();

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
  const n = support.length, small = joined(support.map(one => one.small)), frozen = joined(support.map(one => one.frozen));
  const side = Math.round(Math.sqrt(support[0].small.length / 3));
  const inputs = {images: ["float32", small, [n, 3, side, side]], features: ["float32", frozen, [n, frozen.length / n]]};
  return (await ask({job: "run", graph: "film", inputs}, [small.buffer, frozen.buffer])).film;
}

let version = 0, learning = null;

/** The pictures have changed: learn from them, and from those that change meanwhile. */
function changed() {
  version++;
  showClasses();
  learning ??= learn().finally(() => { learning = null; });
  return learning;
}

async function learn() {
  for (let seen = -1; seen !== version;) {
    seen = version;
    try {
      await learnFrom(examples(), () => seen !== version);
    } catch (error) {
      say(`It could not learn from these pictures: ${error.message}`, true);
    }
  }
}

async function learnFrom(support, outdated) {
  const labels = [...new Set([...startLabels(), ...support.map(one => one.label)])].sort(inOrder);
  if (labels.length < 2) {
    learned = null;
    showLearned();
    return answerAll();
  }
  const began = performance.now();
  const film = start ? filmOf(start.tensors) : await adapted(support), rows = [];
  for (const [index, one] of support.entries()) {
    if (outdated()) return;
    if (performance.now() - began > PATIENCE) {
      say(`Learning: picture ${index + 1} of ${support.length}. Until then answers are by what it learned before.`);
    }
    rows.push((await network(one.square, film)).features);
  }
  const table = supportSet(support, rows, labels), options = calibration(table), number = version;
  const fitted = await ask({job: "fit", number, support: table, options});
  learned = {number, film, labels, table, options, fitted};
  showLearned();
  await answerAll();
}

const startLabels = () => start ? start.header.labels.classes : [];

/** Features, labels and groups of what the page goes on from and of its own pictures. */
function supportSet(support, rows, labels) {
  const table = {features: [], unadapted: [], labels: [], groups: []};
  if (start) {
    const {tensors, header} = start;
    Object.assign(table, supportOf(tensors));
    table.labels = table.labels.map(label => labels.indexOf(header.labels.classes[label]));
  }
  let group = 1 + Math.max(-1, ...table.groups);
  const seen = new Map(); // the same picture twice in a class is one group: it has the same features
  support.forEach((one, index) => {
    const same = `${one.frozen.slice(0, 32).join()} ${one.label}`;
    if (!seen.has(same)) seen.set(same, group++);
    table.features.push(Float64Array.from(rows[index]));
    table.unadapted?.push(Float64Array.from(one.frozen));
    table.labels.push(labels.indexOf(one.label));
    table.groups.push(seen.get(same));
  });
  if (!adapts()) table.unadapted = null;
  return table;
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

// ---------------------------------------------------------------- answers

const outputLabels = () => [...learned.labels, learned.options.unknown ?? ""];

async function answerAll() {
  const asked = queries();
  if (!learned) {
    for (const query of asked) query.answer = null;
    asked.forEach(showQuery);
    if (asked.length) say("Give two classes at least one picture each: then it answers.");
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
  say(files.length === 1 ? "Reading the picture …" : `Reading ${files.length} pictures …`);
  const unreadable = [];
  for (const file of files) {
    try {
      await addPicture(await openPicture(file), file.name, label);
    } catch (error) {
      unreadable.push(file.name);
      console.warn(file.name, error);
    }
  }
  await (label === null ? learning ?? answerAll() : changed());
  if (unreadable.length) say(`${element("status").textContent} Not opened as a picture: ${unreadable.join(", ")}.`, true);
}

async function addPicture(picture, name, label) {
  const square = squareOf(picture, page.side);
  picture.source.close();
  const {features: frozen, small} = await network(square, identityFilm());
  const added = {id: nextId++, label, name, square, frozen, small};
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
  const known = [...new Set([...startLabels(), ...classes])];
  const alike = known.find(one => folded(one) === folded(name));
  if (!name) return say("Give the class a name first.", true);
  if (folded(name) === UNKNOWN) return say(`“${UNKNOWN}” is the answer for pictures of no class: choose another name.`, true);
  if (alike) return say(`There is a class “${alike}” already.`, true);
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
  element("name").focus();
  await changed();
}

// ---------------------------------------------------------------- showing

function canvasOf({square, name}) {
  const canvas = document.createElement("canvas"), side = page.side, pixels = new ImageData(side, side);
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

/** Each class with its pictures. Cards and pictures that are there stay, and so does the focus. */
function showClasses() {
  const names = [...new Set([...startLabels(), ...classes])], list = element("classes");
  const cards = new Map([...list.children].map(card => [card.dataset.name, card]));
  for (const [name, card] of cards) if (!names.includes(name)) card.remove();
  for (const name of names) {
    const card = cards.get(name) ?? classCard(name), own = pictures.filter(one => one.label === name);
    if (!cards.has(name)) list.append(card);
    const known = start ? integersOf(start.tensors.support_labels).filter(label => startLabels()[label] === name).length : 0;
    const number = own.length + known;
    setText(card.querySelector(".count"), number === 1 ? "1 picture" : `${number} pictures`);
    card.querySelector(".remove").hidden = known > 0;
    const place = card.querySelector(".taught"), shown = new Map([...place.children].map(one => [one.dataset.id, one]));
    for (const [id, one] of shown) if (!own.some(picture => String(picture.id) === id)) one.remove();
    for (const picture of own) if (!shown.has(String(picture.id))) place.append(thumbnail(picture));
  }
  const target = element("target"), chosen = target.value;
  target.replaceChildren(new Option("Pictures to classify", ""), ...names.map(name => new Option(name, `class ${name}`)));
  target.value = [...target.options].some(option => option.value === chosen) ? chosen : "";
}

function classCard(name) {
  const card = fromTemplate("class"), input = card.querySelector("input");
  card.dataset.name = name;
  setText(card.querySelector("h3"), name);
  card.querySelector(".remove").setAttribute("aria-label", `Remove the class ${name}`);
  card.querySelector(".remove").addEventListener("click", () => removeClass(name));
  input.setAttribute("aria-label", `Pictures of ${name}`);
  whenChosen(input, files => addFiles(files, name));
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
  if (!learned) return setText(element("figure"), "Two classes with a picture each are enough to begin.");
  const {right, counted} = learned.fitted;
  setText(element("figure"), counted
    ? `Each left out in turn, ${right} of ${counted} pictures are recognised (${percent(right / counted)}).`
    : "Give each class a second picture: then it measures how well it does, and tells pictures of no class.");
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
  const {film, labels, table, options, fitted} = learned, width = table.features[0].length, n = table.labels.length;
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
  if (table.unadapted && options.unknown !== null) {
    tensors.unadapted_features = floatTensor(flat(table.unadapted), [n, width]);
  }
  tensors.support_labels = integerTensor(table.labels);
  if (new Set(table.groups).size < n) tensors.support_groups = integerTensor(table.groups);
  const header = start?.header ?? model.header, rejects = fitted.outliers !== null;
  return writeClassifier(tensors, {
    ...header,
    parameters: {...header.parameters, temperature: options.temperature, unknown_label: rejects ? options.unknown : null,
      false_rejection_rate: options.falseRejectionRate},
    labels: {dtype: `<U${Math.max(...labels.map(label => codePoints(label).length))}`, classes: labels},
    fitted: {...header.fitted, settled: {name: "auto", settings: fitted.settings}, temperature: fitted.temperature,
      unknown_label: rejects ? options.unknown : null, threshold: fitted.outliers?.threshold ?? null,
      units: fitted.outliers?.units ?? null, group_names: null},
  });
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
    if (examples().length && !confirm(`Put “${file.name}” in place of the classes and pictures that are here?`)) return;
    for (const one of examples()) await forgetPicture(one.id);
    pictures = queries();
    classes = [];
    start = opened;
    await storeState("classes", classes);
    await storeState("start", bytes);
    say(`Going on from “${file.name}”.`);
    await changed();
  } catch (error) {
    say(`${file.name} could not be opened. ${error.message}`, true);
  }
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
  if (header.fitted.priors) throw new Error("Its classes have priors, which this page does not know.");
  if (tensors.negative_features) throw new Error("It has examples of no class, which this page does not know.");
  if (!header.labels.classes.every(name => typeof name === "string")) throw new Error("Its classes are numbers.");
}

/** Forget everything that was taught. */
async function forget() {
  if (!confirm("Remove all classes and pictures?")) return;
  await forgetAll();
  await storeState("forgotten", true); // not what the page came with, either
  element("answers").replaceChildren();
  element("asked").hidden = true;
  [classes, pictures, start, learned] = [[], [], null, null];
  await changed();
  say("Everything is removed.");
}

// ---------------------------------------------------------------- the visitor

async function load() {
  await loadPage(({features, film}) => ({headCode: {address: "head.mjs"}, features, ...(film ? {film} : {})}));
  model = readClassifier(await (await get(page.classifier)).arrayBuffer());
  const kept = await openStore();
  if (!kept) setText(element("kept"), "This browser keeps nothing: save the classifier before you leave.");
  const stored = await storedState("start");
  if (stored) start = readClassifier(stored);
  else if (page.goes_on && !await storedState("forgotten")) start = model;
  classes = await storedState("classes") ?? [];
  pictures = await storedPictures();
  nextId = 1 + Math.max(0, ...pictures.map(one => one.id));
  queries().forEach(showQuery);
  say("Ready.");
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
  const label = element("target").value.startsWith("class ") ? element("target").value.slice(6) : null;
  await addPicture(picture, name, label);
  await (label === null ? learning ?? answerAll() : changed());
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
