// The engine on a machine: the program that serves this page, whose interface `openapi.json` describes.
// `learn.js` says what an engine is.
"use strict";

const BATCH = 8; // pictures that are sent at a time
const FRAME = 512; // longest side of a frame of the camera that is asked about

let said = null; // what the program said last
let curve = null, heaps = [], foundOf = null; // of which state
let shown; // to be called after every change
let given = []; // names of classes that have no picture yet
let pictures = [];
let progress = "";

/** What the program answers. */
async function call(method, address, sent) {
  const how = {method, body: sent};
  if (sent && !(sent instanceof FormData || sent instanceof Blob)) {
    Object.assign(how, {body: JSON.stringify(sent), headers: {"Content-Type": "application/json"}});
  }
  let response;
  try {
    response = await fetch(`api/${address}`, how);
  } catch {
    throw new Error("The command that serves this page has stopped. Start it again and reload.");
  }
  if (response.ok) return response;
  const {error} = await response.json().catch(() => ({error: `The program answers ${response.status}.`}));
  throw new Error(error);
}

const asked = async (...request) => (await call(...request)).json();

/** Take over what the program said. */
function take(state) {
  said = state;
  const names = said.classes.map(one => one.name);
  const threshold = said.outlier_threshold;
  pictures = said.pictures.map(([id, name, label, best, unknown, doubt, score, size]) => ({
    id, name: size > 1 ? `${name} and ${size - 1} more` : name, label: label === said.none ? "" : label,
    answer: best && {best: best.map(([place, share]) => [names[place], share]), unknown, doubt, score, threshold},
  }));
  placeOnHeaps();
  given = given.filter(name => !names.includes(name));
  shown();
  findRest();
}

/** Tell pictures which heap they are on; until new heaps are found, the old ones hold for those that still belong. */
function placeOnHeaps() {
  const of = new Map(pictures.map(one => [one.id, one]));
  const belongs = id => of.get(id)?.label === null && of.get(id).answer?.unknown;
  heaps = heaps.map(ids => ids.filter(belongs)).filter(ids => ids.length > 1);
  heaps.forEach((ids, heap) => ids.forEach(id => { of.get(id).heap = heap; }));
}

/** Heaps of pictures and the curve of what it has learned: an answer does not wait for them. */
async function findRest() {
  const version = said.version;
  if (version === foundOf || !said.learned) return;
  foundOf = version;
  const found = await asked("GET", "heaps").catch(() => null);
  if (found === null || said.version !== version || found.version !== version) return;
  heaps = found.heaps;
  placeOnHeaps();
  shown();
  const measured = await asked("GET", "curve").catch(() => null);
  if (said.version !== version) return;
  curve = measured;
  shown();
}

/** Send pictures, some at a time: where, and what is sent beside. */
async function send(files, fields) {
  if (!files.length) return;
  const problems = [];
  for (let first = 0; first < files.length; first += BATCH) {
    progress = files.length > BATCH ? `Reading picture ${first + 1} of ${files.length} …` : "";
    say(progress || (files.length === 1 ? "Reading the picture …" : `Reading ${files.length} pictures …`));
    const form = new FormData();
    for (const [name, value] of Object.entries(fields)) form.append(name, value);
    for (const file of files.slice(first, first + BATCH)) form.append("pictures", file, file.name);
    const {state, problems: found} = await asked("POST", "examples", form);
    problems.push(...Object.entries(found).map(([name, reason]) => `${name}: ${reason}`));
    take(state);
  }
  progress = "";
  tell();
  if (problems.length) say(`${element("status").textContent} Left out: ${problems.join("; ")}.`, true);
}

/** Say what the answers are, or what is missing. */
function tell() {
  const answers = pictures.filter(one => one.label === null && one.answer);
  if (answers.length) say(summary(answers.map(one => one.answer.unknown ? said.none : one.answer.best[0][0])));
  else say(pictures.some(one => one.label === null) ? "Give two classes at least one picture each: then it answers."
    : "Ready.");
}

const sent = label => label === "" ? said.none : label;
const address = id => said.run + "/" + id;
const image = (source, name) => Object.assign(document.createElement("img"), {src: source, alt: name, loading: "lazy",
  draggable: false});
const nameOf = id => pictures.find(one => one.id === id)?.name ?? "";

async function file(address, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await (await call("GET", address)).blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const engine = {
  async open(whenChanged) {
    shown = whenChanged;
    take(await asked("GET", "state"));
    element("example").hidden = said.table !== null;
    element("labels").hidden = said.table === null;
    element("forget").hidden = element("clear").hidden = said.table !== null; // pictures of a folder stay
    document.documentElement.classList.toggle("folder", said.table !== null);
    element("labels").addEventListener("click", () => during(() => file("labels", "labels.csv")));
    if (said.table !== null && said.pictures.length) await askAbout();
    tell();
  },

  get state() {
    const {classes, none, learns_none: learned, none_known: known} = said;
    const measured = said.learned && curve ? [`Each left out in turn, ${percent(curve.measured.at(-1)[1])} of the pictures `
      + "are recognised."] : [];
    return {
      ...said, pictures, progress, curve: said.learned ? curve : null, sentences: [...said.sentences, ...measured],
      classes: [...classes, ...given.map(name => ({name, known: 0}))].map(one => ({share: null, ...one})),
      none: {known, learned, answer: none},
    };
  },

  async learn(files, label) {
    const saved = files.find(one => one.name.endsWith(".safetensors"));
    if (!saved) return send(files, label === null ? {} : {label: sent(label)});
    const own = pictures.some(one => one.label !== null);
    if (own && !confirm(`Put “${saved.name}” in place of the classes and pictures here?`)) return;
    take(await asked("PUT", "model", saved));
    say(`Going on from “${saved.name}”.`);
  },

  async keep({picture, name}, label) {
    const blob = await drawn(picture, Math.max(picture.width, picture.height));
    await send([new File([blob], `${name}.jpg`)], label === null ? {} : {label: sent(label)});
  },

  async see(picture) {
    if (!said.learned) return null;
    const form = new FormData();
    form.append("pictures", await drawn(picture, FRAME), "frame.jpg");
    const {answers: [answer]} = await asked("POST", "classify", form);
    const {probabilities, unknown, doubt, outlier_score: score, outlier_threshold: threshold} = answer;
    return {best: Object.entries(probabilities).slice(0, KEYS), unknown, doubt, score, threshold};
  },

  async addClass(name) {
    name = name.trim().normalize("NFC");
    if (!name) throw new Error("Give the class a name first.");
    const folded = text => text.normalize("NFKC").toLowerCase();
    if ([said.none, "unknown"].some(one => folded(one) === folded(name))) {
      throw new Error(`“${name}” is the answer for pictures of no class: choose another name.`);
    }
    const alike = this.state.classes.find(one => folded(one.name) === folded(name));
    if (alike) throw new Error(`There is a class “${alike.name}” already.`);
    given.push(name);
    shown();
  },

  async removeClass(name) {
    given = given.filter(one => one !== name);
    const ids = pictures.filter(one => one.label === name).map(one => one.id);
    if (ids.length) await this.remove(ids);
    else shown();
  },

  async label(ids, label) {
    const before = Object.fromEntries(ids.map(id => [id, sent(pictures.find(one => one.id === id)?.label ?? null)]));
    try {
      take(await asked("POST", "labels", {pictures: ids, label: sent(label), before}));
    } catch (error) {
      take(await asked("GET", "state")); // others may have labelled it otherwise
      throw error;
    }
    say("Ready.");
  },

  async undo() {
    const {state, pictures: back} = await asked("POST", "undo");
    take(state);
    return back;
  },

  async skip(id) {
    take(await asked("POST", "skip", {picture: id}));
  },

  async remove(ids) {
    take(await asked("DELETE", "examples", {pictures: ids}));
    tell();
  },

  next: async () => said.next,
  nearest: async id => (await asked("GET", `nearest/${id}`)).nearest,
  drawing: id => image(`api/thumbnail/${address(id)}`, nameOf(id)),
  large: id => image(`api/picture/${address(id)}`, nameOf(id)),
  save: () => file("model", "classifier.safetensors"),

  async savePage() {
    const title = prompt("Heading of the page", "Picture classifier");
    if (title === null) return;
    say("Making the page …");
    await file(`page?title=${encodeURIComponent(title)}`, "page.zip");
    say("The page is in page.zip: unpack it into a folder of a web server.");
  },

  async forget() {
    given = [];
    take(await asked("DELETE", "examples", {pictures: pictures.map(one => one.id)}));
    say("Everything is removed.");
  },

  async example() {
    take(await asked("POST", "example"));
    tell();
  },
};

/** A picture as a JPEG file (Blob) of at most so many pixels a side. */
function drawn(picture, side) {
  const scale = Math.min(1, side / Math.max(picture.width, picture.height)), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.scale(canvas.width / picture.width, canvas.height / picture.height);
  drawUpright(context, picture);
  return new Promise(resolve => canvas.toBlob(resolve, "image/jpeg", 0.95));
}
