// The page that is taught: classes with their pictures, and answers to others. What learns and answers is an engine, in
// this browser (`browser.js`) or on a machine (`machine.js`); this file shows what it knows, and sends what the user
// does. An engine has
//
//   open(changed)          load; `changed` is to be called after every change
//   state                  classes [{name, known, share}], none {known, learned, answer}, pictures [{id, name, label,
//                          answer: {best: [[class, probability]], unknown, doubt, score, threshold}, heap}], learned,
//                          sentences, curve, progress, undo
//   learn(files, label), keep(frame, label), label(ids, label), undo(), remove(ids), addClass(name), removeClass(name),
//   setShares(shares), skip(id), next(), nearest(id), see(frame), drawing(id), large(id), save(), savePage(), forget(),
//   example()
//
// A label is the name of a class, "" for none of these, or null if the picture is asked about. `score` is the outlier
// score, above the threshold of which a picture is unknown; both are null if nothing is rejected. `heap` is the number of
// the new class that is proposed for a picture, 0 for the largest, or null; an engine may know of none. An error of a
// method is a sentence for the user.
"use strict";

const SHOWN = 24; // answers, and pictures of a class, that are shown at a time: the wall has all of them
const SMALL = 84, CHOICES = 4;

let state = null; // of the engine
let scheduled = false; // is there a change that is not shown yet?
let busy = false;
let view = "teach"; // or "question" or "wall"

/** The engine has changed: show it, with the next frame. */
function whenChanged() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(show);
  setTimeout(show, 100); // frames wait while the page is in the background
}

function show() {
  if (!scheduled) return;
  scheduled = false;
  state = engine.state;
  document.body.className = view;
  for (const name of ["teach", "question", "wall"]) {
    element(name).hidden = view !== name;
    element(`to-${name}`).setAttribute("aria-pressed", view === name);
  }
  element("undo").disabled = !state.undo;
  if (view === "teach") element("labelling").hidden = true;
  showNames();
  if (view === "teach") showTeaching();
  else showCorrecting();
  showWayToHeaps();
}

/** Do something with the engine, one thing at a time: a key that is pressed meanwhile would mean something else. */
async function doing(work) {
  if (busy) return false;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  try {
    await ready;
    await work();
    return true;
  } catch (error) {
    say(error.message, true);
    return false;
  } finally {
    busy = false;
    document.body.removeAttribute("aria-busy");
    whenChanged();
  }
}

/** The same for what takes long, such as reading pictures, while which others may go on. */
async function during(work) {
  try {
    await ready;
    await work();
  } catch (error) {
    say(error.message, true);
  }
  whenChanged();
}

const labelOf = ({label, answer}) => label ?? (answer ? answer.unknown ? "" : answer.best[0][0] : null);
const named = label => label === "" ? "none of these" : label;

/** Whether a picture can be none of these: it teaches what to reject, or at least stands in the table. */
const canBeNone = () => state.none.learned || state.table;

/** The name of a class that was typed. */
function typedName(text) {
  if (!text.trim()) throw new Error("Give the class a name first.");
  return text;
}

/** The names of classes, for fields in which one is typed. */
function showNames() {
  const names = state.classes.map(one => one.name), list = element("names");
  if ([...list.children].map(option => option.value).join("\n") === names.join("\n")) return;
  list.replaceChildren(...names.map(name => Object.assign(document.createElement("option"), {value: name})));
}

function choice(key, name, share, onclick) {
  const button = document.createElement("button");
  button.type = "button";
  button.addEventListener("click", onclick);
  if (key !== "") button.append(textElement("kbd", key), " ");
  button.append(name);
  if (share !== undefined) button.append(" ", textElement("span", percent(share)));
  return button;
}

// ---------------------------------------------------------------- teaching

function showTeaching() {
  const {classes, pictures} = state, list = element("classes"), names = classes.map(one => one.name);
  const own = new Map([["", []], ...names.map(name => [name, []])]);
  for (const one of pictures) if (one.label !== null) own.get(one.label)?.push(one);
  const cards = new Map([...list.children].map(card => [card.dataset.name, card]));
  for (const [name, card] of cards) if (!own.has(name)) card.remove();
  for (const one of classes) {
    if (!cards.has(one.name)) list.append(classCard(one.name));
    showCard(cards.get(one.name) ?? list.lastElementChild, one, own.get(one.name));
  }
  if (!element("none").children.length) element("none").append(noneCard());
  showCard(element("none").firstElementChild, {name: "", share: null, ...state.none}, own.get(""));
  element("none").hidden = !names.length || !state.none.learned;
  element("common").hidden = !engine.setShares || names.length < 2;
  element("shares").checked = classes.some(one => one.share !== null);
  showTarget(names);
  element("save").disabled = element("save-page").disabled = !state.learned;
  setText(element("figure"), state.sentences.join(" "));
  setText(element("learning"), state.progress);
  showCurve(state.curve);
  showAnswers(pictures.filter(one => one.label === null));
}

/** Where a frame of the camera can go. */
function showTarget(names) {
  const target = element("target"), chosen = target.value;
  const choices = [["Pictures to classify", ""], ...names.map(name => [name, `class ${name}`])];
  if (!element("none").hidden) choices.push(["None of these", "none"]);
  target.replaceChildren(...choices.map(([text, value]) => new Option(text, value)));
  target.value = [...target.options].some(option => option.value === chosen) ? chosen : "";
}

function showCard(card, {name, known, share}, own) {
  const number = own.length + known, latest = own.slice(-SHOWN);
  setText(card.querySelector(".count"), number === 1 ? "1 picture" : `${number.toLocaleString("en")} pictures`);
  card.querySelector(".remove").hidden = name === "" || known > 0;
  card.querySelector(".share").hidden = share === null;
  const field = card.querySelector(".share input");
  if (share !== null && document.activeElement !== field) field.value = Number(share.toPrecision(6));
  const place = card.querySelector(".taught"), shown = new Map([...place.children].map(one => [one.dataset.id, one]));
  for (const [id, one] of shown) if (!latest.some(picture => String(picture.id) === id)) one.remove();
  for (const picture of latest) if (!shown.has(String(picture.id))) place.append(thumbnail(picture));
  const more = own.length - latest.length;
  setText(card.querySelector(".more"), more ? `and ${more.toLocaleString("en")} more, on the wall` : "");
}

function classCard(name) {
  const card = fromTemplate("class"), [input, share] = ["file", "number"].map(type => card.querySelector(`[type=${type}]`));
  card.dataset.name = name;
  setText(card.querySelector("h3"), name);
  card.querySelector(".remove").setAttribute("aria-label", `Remove the class ${name}`);
  card.querySelector(".remove").addEventListener("click", () => {
    during(() => engine.removeClass(name));
    element("name").focus();
  });
  input.setAttribute("aria-label", `Pictures of ${name}`);
  share.setAttribute("aria-label", `Share of ${name}`);
  share.addEventListener("change", () => shareChanged(name, share.value));
  whenChosen(input, files => during(() => engine.learn(files, name)));
  return card;
}

/** Where pictures of none of the classes go. */
function noneCard() {
  const card = classCard("");
  setText(card.querySelector("h3"), "None of these");
  card.querySelector("[type=file]").setAttribute("aria-label", "Pictures of none of the classes");
  card.querySelector(".heading").after(textElement("p", "Pictures of other things that it will see, if there are "
    + "some: it learns better what is unknown."));
  return card;
}

function thumbnail(picture) {
  const item = document.createElement("li"), button = textElement("button", "×"), drawing = engine.drawing(picture.id);
  item.dataset.id = picture.id;
  button.type = "button";
  button.setAttribute("aria-label", `Remove ${picture.name}`);
  button.addEventListener("click", () => during(() => engine.remove([picture.id])));
  drawing.style.width = drawing.style.height = `${SMALL}px`;
  item.append(drawing, button);
  return item;
}

/** What a visitor writes into the field of a class. */
function shareChanged(name, text) {
  const share = Number(text);
  if (!text.trim() || !(share >= 0 && share < Infinity)) {
    return say(`Give the share of “${name}” as a number that is 0 or more.`, true);
  }
  return during(() => engine.setShares({[name]: share}));
}

const inRange = ({accuracy, low, high}) => `${percent(accuracy)} (${percent(low)} to ${percent(high)})`;

/** Whether more pictures would help. */
function showCurve(curve) {
  element("enough").hidden = !curve;
  if (!curve) return;
  const {usual, now, more, advice} = curve;
  setText(element("advice"), advice);
  setText(element("expected"),
    `Expected on new ones: ${inRange(now)}, and with ${usual} more of each class ${inRange(more.at(-1))}.`);
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

// ---------------------------------------------------------------- answers

/** The newest answers as cards, the newest first. */
function showAnswers(asked) {
  const latest = asked.slice(-SHOWN), list = element("answers");
  const cards = new Map([...list.children].map(card => [card.dataset.id, card]));
  for (const [id, card] of cards) if (!latest.some(one => String(one.id) === id)) card.remove();
  for (const query of latest) {
    let card = cards.get(String(query.id));
    if (!card) list.prepend(card = answerCard(query));
    showQuery(card, query);
  }
  const more = asked.length - latest.length;
  setText(element("more"), more ? `The newest ${SHOWN} of ${asked.length.toLocaleString("en")}; all answers are on the wall.`
    : "");
  element("asked").hidden = !asked.length;
}

function answerCard({id, name}) {
  const [card] = addCards([name]), input = card.querySelector(".choices input"), details = card.querySelector("details");
  card.querySelector(".choices").setAttribute("aria-label", `What is ${name}?`);
  const drawing = engine.drawing(id);
  drawing.setAttribute("aria-label", name);
  card.dataset.id = id;
  card.querySelector("canvas").replaceWith(drawing);
  card.querySelector(".remove").setAttribute("aria-label", `Remove ${name}`);
  card.querySelector(".remove").addEventListener("click", () => during(() => engine.remove([id])));
  input.addEventListener("keydown", event => {
    if (event.key === "Enter") doing(() => engine.label([id], typedName(input.value)));
  });
  details.addEventListener("toggle", () => { if (details.open) showNearest(card, id); });
  return card;
}

function showQuery(card, query) {
  const {answer} = query, place = card.querySelector(".choices");
  card.querySelector("details").hidden = !answer;
  if (card.answer === answer && place.children.length > 1) return;
  card.answer = answer;
  if (answer) showBest(card, answer);
  else {
    setText(card.querySelector(".label"), "…");
    setText(card.querySelector(".text"), "");
  }
  const likely = answer ? answer.best.map(([name]) => name) : state.classes.map(one => one.name);
  const names = [...likely.slice(0, CHOICES), ...(canBeNone() ? [""] : [])];
  const buttons = names.map(name => choice("", named(name), undefined, () => doing(() => engine.label([query.id], name))));
  place.replaceChildren(...buttons, place.querySelector("input"));
  if (answer && card.querySelector("details").open) showNearest(card, query.id);
}

/** An answer: its most probable classes. */
function showBest(place, {best, unknown, score, threshold, doubt}) {
  const labels = best.map(([name]) => name), probabilities = best.map(([, probability]) => probability);
  const answer = {probabilities, label: unknown ? best.length : 0, score, threshold, doubt};
  showAnswer(place, answer, [...labels, state.none.answer]);
}

async function showNearest(card, id) {
  const found = await engine.nearest(id).catch(error => say(error.message, true));
  if (!found) return;
  card.querySelector(".pictures").replaceChildren(...found.map(({label, id: other}) => {
    const item = document.createElement("li"), drawing = other === null ? textElement("span", "no picture")
      : engine.drawing(other);
    drawing.classList.add("drawing");
    item.append(drawing, textElement("span", label));
    return item;
  }));
  card.querySelector(".nearest").hidden = !found.length;
}

// ---------------------------------------------------------------- the visitor

element("add").addEventListener("submit", event => {
  event.preventDefault();
  during(async () => {
    await engine.addClass(element("name").value);
    say(`Now give “${element("name").value.trim()}” some pictures.`);
    element("name").value = "";
  });
});
for (const id of ["files", "open"]) whenChosen(element(id), files => during(() => engine.learn(files, null)));
whenDropped((files, place) => during(() => engine.learn(files, place?.closest?.(".class")?.dataset.name ?? null)));
offerCamera(async picture => {
  await ready;
  const answer = await engine.see(picture);
  if (answer) showBest(element("live"), answer);
}, frame => during(async () => {
  const {value} = element("target");
  await engine.keep(frame, value === "none" ? "" : value.startsWith("class ") ? value.slice(6) : null);
}));
element("shares").addEventListener("change", event => {
  const names = state.classes.map(one => one.name), equal = Object.fromEntries(names.map(name => [name, 100 / names.length]));
  during(() => engine.setShares(event.target.checked ? equal : null));
});
element("clear").addEventListener("click", () => {
  during(async () => {
    await engine.remove(state.pictures.filter(one => one.label === null).map(one => one.id));
    say("Ready.");
  });
  element("files").focus();
});
for (const [id, name] of [["save", "save"], ["save-page", "savePage"], ["example", "example"]]) {
  element(id).addEventListener("click", () => during(() => engine[name]()));
}
element("forget").addEventListener("click", () => {
  if (confirm("Remove all classes and pictures?")) during(() => engine.forget());
});

const ready = engine.open(whenChanged);
ready.then(whenChanged, error => say(error.message, true));
