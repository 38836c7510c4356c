// The page of `review`: one question at a time, or the wall of all answers. The server decides; this shows and sends.
"use strict";

const part = id => document.getElementById(id);
const percent = share => `${Math.round(100 * share)}%`;

let state = null;            // what the server said last
let view = "question";       // or "wall"
const wanted = {question: {}, wall: {}};  // what each asks for: a picture; label and place of the first one
let selected = new Set();    // places on the wall's page
let anchor = 0, current = 0; // where a selection with Shift starts, and the tile that has the focus
let before = selected;       // what was selected when it started
let busy = false;

// ---------------------------------------------------------------- the server

async function ask(address, sent) {
  const how = sent === undefined ? {} : {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(sent),
  };
  let response;
  try {
    response = await fetch(address, how);
  } catch {
    throw new Error("The command that serves this page has stopped. Start it again and reload: every label is kept.");
  }
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// One thing at a time: a key that is pressed before the next question is there would answer the wrong one.
async function doing(work) {
  if (busy) return;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  try {
    await work();
    part("problem").hidden = true;
  } catch (error) {
    part("problem").textContent = error.message;
    part("problem").hidden = false;
  } finally {
    busy = false;
    document.body.removeAttribute("aria-busy");
  }
}

async function show() {
  state = await ask(`${view}?${new URLSearchParams(wanted[view])}`);
  document.body.className = view;
  showState();
  if (view === "question") showQuestion();
  else showWall();
}

const askAbout = picture => doing(async () => {
  view = "question";
  wanted.question = picture === undefined ? {} : {picture};
  await show();
});

const showAnswers = (label, first = 0) => doing(async () => {
  view = "wall";
  if (label !== undefined) {
    wanted.wall = {label, first};
    current = 0;
  } else if (wanted.wall.label === undefined) {
    wanted.wall = {label: state.classes.find(row => row[1])[0], first: 0};
  }
  await show();
});

const label = name => doing(async () => {
  const pictures = view === "question" ? [state.question.picture] : chosen();
  await ask("label", {pictures, label: name});
  wanted.question = {};
  await show();
});

const undo = () => doing(async () => {
  const {pictures} = await ask("undo", {});
  if (pictures.length) wanted.question = {picture: pictures[0]};
  await show();
});

const skip = () => doing(async () => {
  await ask("skip", {picture: state.question.picture});
  wanted.question = {};
  await show();
});

// ---------------------------------------------------------------- what is shown

function element(kind, text = "", properties = {}) {
  return Object.assign(document.createElement(kind), {textContent: text}, properties);
}

function choice(key, name, share, onclick) {
  const button = element("button", "", {type: "button", onclick});
  if (key !== "") button.append(element("kbd", key), " ");
  button.append(name);
  if (share !== undefined) button.append(element("span", share));
  return button;
}

function showState() {
  part("progress").textContent =
    `${state.labelled.toLocaleString()} of ${state.total.toLocaleString()} labelled, in ${state.table}`;
  part("undo").disabled = !state.undo;
  part("one").setAttribute("aria-pressed", view === "question");
  part("all").setAttribute("aria-pressed", view === "wall");
  part("question").hidden = view !== "question";
  part("wall").hidden = view !== "wall";
  part("names").replaceChildren(...state.classes.filter(row => row[0] !== state.none).map(
    row => element("option", "", {value: row[0]})));
}

function showQuestion() {
  const question = state.question;
  part("answers").hidden = !question;
  part("large").hidden = !question;
  part("asked").textContent = question ? "What is it?" : "Every picture has a label.";
  part("name").textContent = question ? question.name : "";
  part("selected").textContent = "";
  if (!question) return;
  part("large").src = `picture/${question.picture}?${state.run}`;
  if (question.labelled) part("asked").textContent = `What is it? You said: ${question.label}.`;
  showChoices(question.likely, true);
}

function showChoices(likely, single) {
  const buttons = likely.map(([name, share], index) =>
    choice(index + 1, name, single ? percent(share) : undefined, () => label(name)));
  buttons.push(choice(0, "none of these", undefined, () => label(state.none)));
  if (single) buttons.push(choice("s", "Later", undefined, skip));
  part("choices").replaceChildren(...buttons);
}

function showWall() {
  part("tabs").replaceChildren(...state.classes.map(([name, count]) => {
    const tab = choice("", name === state.none ? "none of these" : name, count.toLocaleString(),
      () => showAnswers(name));
    tab.setAttribute("aria-pressed", name === wanted.wall.label);
    return tab;
  }));
  const {first, answers, total, likely} = state.page;
  const last = first + answers.length;
  part("shown").textContent = wanted.wall.label === state.none ? "None of these" : wanted.wall.label;
  part("place").textContent = total ?
    `${(first + 1).toLocaleString()} to ${last.toLocaleString()} of ${total.toLocaleString()}` : "none";
  part("before").disabled = first === 0;
  part("after").disabled = last >= total;
  part("tiles").replaceChildren(...answers.map(tile));
  part("answers").hidden = !answers.length;
  showChoices(likely.map(name => [name]), false);
  select(Math.max(0, Math.min(current, answers.length - 1)), new Set());
  if (!(document.activeElement instanceof HTMLInputElement)) focusTile();
}

function tile(answer, place) {
  const figure = element("div", "", {className: "tile", title: answer.name});
  figure.setAttribute("role", "option");
  figure.setAttribute("aria-label", `${answer.name}, ${answer.labelled ? "labelled" : percent(answer.probability)}`);
  const caption = element("p");
  caption.append(element("span", answer.name.replace(/^.*[/\\]/, ""), {className: "name"}),
    element("span", answer.labelled ? "✓" : percent(answer.probability)));
  figure.append(element("img", "", {src: `thumbnail/${answer.picture}?${state.run}`, alt: "", draggable: false}), caption);
  figure.onclick = event => event.shiftKey ? extend(place) : toggle(place);
  figure.ondblclick = () => askAbout(answer.picture);
  return figure;
}

// ---------------------------------------------------------------- selecting

const chosen = () => [...selected].map(place => state.page.answers[place].picture);

// Start a selection at a place.
function select(place, places) {
  anchor = current = place;
  before = selected = places;
  showSelection();
}

function toggle(place) {
  const places = new Set(selected);
  if (!places.delete(place)) places.add(place);
  select(place, places);
  focusTile();
}

// Select everything from where the selection started to a place.
function extend(place) {
  const low = Math.min(anchor, place), length = Math.abs(anchor - place) + 1;
  selected = new Set([...before, ...Array.from({length}, (_, index) => low + index)]);
  current = place;
  showSelection();
  focusTile();
}

// Go to a place without selecting it.
function go(place) {
  select(place, selected);
  focusTile();
}

function showSelection() {
  [...part("tiles").children].forEach((figure, place) => {
    figure.setAttribute("aria-selected", selected.has(place));
    figure.tabIndex = place === current ? 0 : -1;
  });
  part("selected").textContent = selected.size ? `${selected.size} selected. What are they?` : "None selected.";
}

function focusTile() {
  const figure = part("tiles").children[current];
  if (figure) figure.focus();
}

function moved(key) {
  const figures = [...part("tiles").children];
  const columns = figures.filter(figure => figure.offsetTop === figures[0].offsetTop).length;
  const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[key];
  const place = {Home: 0, End: figures.length - 1}[key] ?? current + by;
  return place >= 0 && place < figures.length ? place : current;
}

// ---------------------------------------------------------------- keys

function turn(forward) {
  const {first, answers, total} = state.page;
  const place = forward ? first + answers.length : first - 1;
  if (place >= 0 && place < total) showAnswers(wanted.wall.label, place);
}

function press(event) {
  const key = event.key;
  if (key === "q") return askAbout(), true;
  if (key === "w") return showAnswers(), true;
  if (key === "u") return undo(), true;
  if (key === "/") return part("typed").focus(), true;
  if (/^[0-9]$/.test(key)) {
    const button = part("answers").hidden ? null : [...part("choices").children].find(
      button => button.firstChild.textContent === key);
    if (button) button.click();
    return true;
  }
  if (view === "question") return key === "s" && state.question ? (skip(), true) : false;
  if (key === "PageUp" || key === "PageDown") return turn(key === "PageDown"), true;
  if (key === "Escape") return select(current, new Set()), true;
  if (!part("tiles").contains(document.activeElement)) return false;
  if (key === " ") return toggle(current), true;
  if (key === "Enter") return askAbout(state.page.answers[current].picture), true;
  if (/^(Arrow|Home$|End$)/.test(key)) return (event.shiftKey ? extend : go)(moved(key)), true;
  return false;
}

document.addEventListener("keydown", event => {
  if (!state || event.altKey || event.isComposing) return;
  const typing = event.target === part("typed");
  const control = event.ctrlKey || event.metaKey;
  if (typing) {
    if (event.key === "Escape") part("typed").blur();
  } else if (control) {
    if (event.key === "z") undo();
    else if (event.key === "a" && view === "wall") {
      select(current, new Set(state.page.answers.keys()));
    } else return;
    event.preventDefault();
  } else if (press(event)) event.preventDefault();
});

part("other").addEventListener("submit", event => {
  event.preventDefault();
  const typed = part("typed");
  label(typed.value).then(() => {
    if (!part("problem").hidden) return;
    typed.value = "";
    typed.blur();
  });
});
part("one").onclick = () => askAbout();
part("all").onclick = () => showAnswers();
part("undo").onclick = undo;
part("before").onclick = () => turn(false);
part("after").onclick = () => turn(true);
askAbout();
