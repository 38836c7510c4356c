// One question at a time, the wall of all answers, and on it heaps of pictures of no class that look like one thing: all
// are worked by keys, and each answer is learned.
"use strict";

const PER_PAGE = 60;

let question = null;         // id of the picture that is asked about
let wall = {label: null, first: 0}; // answers that the wall shows, or the number of a heap, and the place of its first picture
let heap = "";               // ids of the heap whose pictures were all selected when it was shown
let onWall = [];             // pictures on the wall's page
let selected = new Set();    // their ids
let anchor = 0, current = 0; // where a selection with Shift starts, and the tile that has the focus
let before = selected;       // what was selected when it started

function goTo(name) {
  view = name;
  whenChanged();
}

/** Ask about a picture, or about the one whose label would teach most. */
async function askAbout(id) {
  question = id ?? await engine.next();
  goTo("question");
}

function showCorrecting() {
  if (view === "question") showQuestion();
  else showWall();
  element("labelling").hidden = view === "question" ? question === null : !onWall.length;
}

/** How many pictures have a label. */
function showCount() {
  const labelled = state.pictures.filter(one => one.label !== null).length;
  setText(element("progress"), `${labelled.toLocaleString("en")} of ${state.pictures.length.toLocaleString("en")} labelled`
    + (state.table ? `, in ${state.table}` : ""));
}

// ---------------------------------------------------------------- one at a time

function showQuestion() {
  const picture = state.pictures.find(one => one.id === question);
  if (!picture) question = null;
  showCount();
  setText(element("question-name"), picture ? picture.name : "");
  setText(element("what"), !picture ? state.pictures.length ? "Every picture has a label." : "Drop some pictures here first."
    : picture.label !== null ? `What is it? You said: ${named(picture.label)}.` : "What is it?");
  setText(element("selected"), "");
  setText(element("grade"), picture?.answer ? graded(picture.answer) : "");
  if (!picture) return element("large").replaceChildren();
  if (element("large").dataset.id !== String(picture.id) || !element("large").children.length) {
    element("large").replaceChildren(engine.large(picture.id));
    element("large").dataset.id = picture.id;
  }
  const best = picture.answer?.best ?? state.classes.slice(0, KEYS).map(one => [one.name, undefined]);
  showChoices(best, true);
}

/** An answer in one line. */
function graded(answer) {
  const [[best, share]] = answer.best;
  const text = answer.unknown ? `${state.none.answer}; the most probable class is ${best}, ${percent(share)}.`
    : `${best}, ${percent(share)} probable.`;
  return `${text} ${inGrades(answer)}`;
}

function showChoices(best, single) {
  const buttons = best.map(([name, share], index) => choice(index + 1, name, share, () => label(name)));
  if (canBeNone()) buttons.push(choice(0, "none of these", undefined, () => label("")));
  if (single) buttons.push(choice("s", "Later", undefined, skip));
  element("choices").replaceChildren(...buttons);
}

const label = (name, checked = name => name) => doing(async () => {
  await engine.label(view === "question" ? [question] : [...selected], checked(name));
  if (view === "question") question = await engine.next();
  else select(current, new Set()); // or the next key would label them again
});

const skip = () => doing(async () => {
  await engine.skip(question);
  question = await engine.next();
});

const undo = () => doing(async () => {
  const [first] = await engine.undo();
  if (view === "question") question = first ?? question;
});

// ---------------------------------------------------------------- the wall

function showWall() {
  const groups = new Map([...state.classes.map(one => [one.name, []]), ["", []]]);
  for (const one of state.pictures) {
    const name = labelOf(one);
    if (name !== null) groups.get(name)?.push(one);
  }
  const unanswered = state.pictures.filter(one => labelOf(one) === null);
  if (unanswered.length) groups.set(null, unanswered);
  const heaps = heapsOf(state.pictures), all = new Map([...groups, ...heaps]);
  if (isHeap(wall.label) && heaps.size) wall.label = Math.min(wall.label, heaps.size - 1); // others have gone
  if (!all.has(wall.label)) {
    const full = [...groups].filter(([, own]) => own.length), open = full.find(([, own]) => own.some(one => one.label === null));
    wall = {label: (open ?? full[0])?.[0] ?? "", first: 0};
  }
  const sure = one => one.label !== null ? 1 : -(one.answer?.doubt ?? 1), own = all.get(wall.label);
  own.sort((one, other) => sure(one) - sure(other) || one.id - other.id);
  const heapShown = isHeap(wall.label), perPage = heapShown ? Infinity : PER_PAGE; // a heap is named at once
  const first = Math.max(0, Math.min(wall.first, own.length - 1)), start = first - first % perPage;
  showCount();
  element("tabs").replaceChildren(...[...groups].filter(([, of]) => of.length).map(([name, of]) => {
    const tab = choice("", tabName(name), undefined, () => turnTo(name, 0));
    tab.append(" ", textElement("span", tally(of)));
    tab.setAttribute("aria-pressed", name === wall.label);
    return tab;
  }));
  onWall = own.slice(start, start + perPage);
  wall.first = start;
  setText(element("shown"), heapShown ? `These ${own.length.toLocaleString("en")} look like one thing`
    : tabName(wall.label));
  element("heap-hint").hidden = !heapShown;
  element("wall-hint").hidden = heapShown;
  setText(element("place"), heapShown ? `${wall.label + 1} of ${heaps.size}`
    : own.length ? `${(start + 1).toLocaleString("en")} to `
    + `${(start + onWall.length).toLocaleString("en")} of ${own.length.toLocaleString("en")}` : "none");
  element("before").disabled = heapShown ? wall.label === 0 : start === 0;
  element("after").disabled = heapShown ? wall.label === heaps.size - 1 : start + perPage >= own.length;
  showTiles();
  showChoices(likely(own).map(name => [name]), false);
  const shownHeap = heapShown ? own.map(one => one.id).sort().join() : "";
  selected = new Set(shownHeap === heap ? [...selected].filter(id => onWall.some(one => one.id === id))
    : shownHeap ? own.map(one => one.id) : []);
  heap = shownHeap;
  current = Math.max(0, Math.min(current, onWall.length - 1));
  showSelection();
}

/** How many pictures have no label yet, and how many have one. */
function tally(own) {
  const labelled = own.filter(one => one.label !== null).length, counts = [];
  if (labelled < own.length) counts.push((own.length - labelled).toLocaleString("en"));
  if (labelled) counts.push(`${labelled.toLocaleString("en")} ✓`);
  return counts.join(" + ");
}

const tabName = name => name === null ? "not answered yet" : named(name);

const isHeap = label => typeof label === "number";

/** The heaps among pictures, by their numbers; an engine may know of none. */
function heapsOf(pictures) {
  const heaps = new Map();
  for (const one of pictures.filter(({heap}) => isHeap(heap))) heaps.set(one.heap, [...heaps.get(one.heap) ?? [], one]);
  return new Map([...heaps].sort(([one], [other]) => one - other));
}

function showWayToHeaps() {
  const way = element("to-heaps"), shown = view === "wall" && isHeap(wall.label);
  way.hidden = !state.pictures.some(one => isHeap(one.heap));
  way.setAttribute("aria-pressed", shown);
  if (shown) element("to-wall").setAttribute("aria-pressed", false);
}

/** Classes, the most probable of some pictures first. */
function likely(own) {
  const sums = new Map(state.classes.map(one => [one.name, 0]));
  for (const {answer} of own) for (const [name, share] of answer?.best ?? []) sums.set(name, (sums.get(name) ?? 0) + share);
  return [...sums].sort(([, one], [, other]) => other - one).slice(0, KEYS).map(([name]) => name);
}

/** Tiles of this page; those that are there already are not drawn anew. */
function showTiles() {
  const there = new Map([...element("tiles").children].map(tile => [tile.dataset.id, tile]));
  const tiles = onWall.map(picture => {
    const tile = there.get(String(picture.id)) ?? newTile(picture), [best, share] = picture.answer?.best[0] ?? [];
    const unknown = picture.label === null && Boolean(picture.answer?.unknown);
    const text = picture.label !== null ? "✓" : share === undefined ? ""
      : unknown ? `${best} ${percent(share)}` : percent(share); // otherwise the tab says the class
    setText(tile.querySelector(".sure"), text);
    tile.classList.toggle("unknown", unknown);
    tile.setAttribute("aria-label", `${picture.name}, ${picture.label !== null ? "labelled" : text}`);
    return tile;
  });
  const present = [...element("tiles").children], focused = element("tiles").contains(document.activeElement);
  if (present.length !== tiles.length || present.some((tile, place) => tile !== tiles[place])) {
    element("tiles").replaceChildren(...tiles);
    if (focused) focusTile();
  }
}

function newTile({id, name}) {
  const tile = document.createElement("div"), caption = document.createElement("p");
  tile.className = "tile";
  tile.title = name;
  tile.dataset.id = id;
  tile.setAttribute("role", "option");
  caption.append(Object.assign(textElement("span", name.replace(/^.*[/\\]/, "")), {className: "name"}),
    Object.assign(textElement("span", ""), {className: "sure"}));
  const drawing = engine.drawing(id);
  drawing.setAttribute("aria-hidden", "true"); // the tile has the name
  tile.append(drawing, caption);
  const place = () => onWall.findIndex(one => one.id === id);
  tile.onclick = event => event.shiftKey ? extend(place()) : toggle(place());
  tile.ondblclick = () => askAbout(id);
  return tile;
}

function turnTo(name, first) {
  wall = {label: name, first};
  heap = "";
  select(0, new Set());
  whenChanged();
}

// ---------------------------------------------------------------- selecting

/** Start a selection at a place. */
function select(place, ids) {
  anchor = current = place;
  before = selected = ids;
  showSelection();
}

function toggle(place) {
  const ids = new Set(selected);
  if (!ids.delete(onWall[place].id)) ids.add(onWall[place].id);
  select(place, ids);
  focusTile();
}

/** Select everything from where the selection started to a place. */
function extend(place) {
  const [low, high] = [Math.min(anchor, place), Math.max(anchor, place)];
  selected = new Set([...before, ...onWall.slice(low, high + 1).map(one => one.id)]);
  current = place;
  showSelection();
  focusTile();
}

/** Go to a place without selecting it. */
function go(place) {
  select(place, selected);
  focusTile();
}

function showSelection() {
  [...element("tiles").children].forEach((tile, place) => {
    tile.setAttribute("aria-selected", selected.has(Number(tile.dataset.id)));
    tile.tabIndex = place === current ? 0 : -1;
  });
  const [only] = selected.size === 1 ? onWall.filter(one => selected.has(one.id)) : [];
  setText(element("selected"), !selected.size ? "None selected."
    : only?.answer ? `1 selected: ${graded(only.answer)}` : `${selected.size} selected. What are they?`);
}

function focusTile() {
  element("tiles").children[current]?.focus();
}

function moved(key) {
  const tiles = [...element("tiles").children];
  const columns = tiles.filter(tile => tile.offsetTop === tiles[0].offsetTop).length;
  const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns}[key];
  const place = {Home: 0, End: tiles.length - 1}[key] ?? current + by;
  return place >= 0 && place < tiles.length ? place : current;
}

// ---------------------------------------------------------------- keys

const turn = forward => {
  const button = element(forward ? "after" : "before");
  if (button.disabled) return;
  if (isHeap(wall.label)) turnTo(wall.label + (forward ? 1 : -1), 0);
  else turnTo(wall.label, wall.first + (forward ? PER_PAGE : -1));
};
const toQuestion = id => doing(() => askAbout(id));

function toHeaps() {
  if (element("to-heaps").hidden) return;
  turnTo(0, 0);
  goTo("wall");
}

function toWall() {
  if (isHeap(wall.label)) turnTo("", 0);
  else if (!onWall.length) wall = {label: undefined, first: 0}; // none is left: go on with the next class
  goTo("wall");
}

/** Whether a key means something here; if so, it is done. */
function press({key, shiftKey}) {
  if (key === "t") return goTo("teach"), true;
  if (key === "q") return toQuestion(), true;
  if (key === "w") return toWall(), true;
  if (key === "h") return toHeaps(), true;
  if (key === "u") return undo(), true;
  if (view === "teach") return false;
  if (key === "/") return element("typed").focus(), true;
  if (/^[0-9]$/.test(key)) {
    if (!element("labelling").hidden) {
      [...element("choices").children].find(button => button.firstChild.textContent === key)?.click();
    }
    return true;
  }
  if (view === "question") return key === "s" && question !== null ? (skip(), true) : false;
  if (key === "PageUp" || key === "PageDown") return turn(key === "PageDown"), true;
  if (key === "Escape") return select(current, new Set()), true;
  if (!onWall.length) return false;
  if (!element("tiles").contains(document.activeElement)) return false;
  if (key === " ") return toggle(current), true;
  if (key === "Enter") return toQuestion(onWall[current].id), true;
  if (/^(Arrow|Home$|End$)/.test(key)) return (shiftKey ? extend : go)(moved(key)), true;
  return false;
}

document.addEventListener("keydown", event => {
  if (!state || event.altKey || event.isComposing) return;
  const {target, key} = event, control = event.ctrlKey || event.metaKey;
  if (target.matches("input:not([type=checkbox], [type=file]), select")) {
    if (key === "Escape") target.blur();
  } else if (control) {
    if (key === "z") undo();
    else if (key === "a" && view === "wall") select(current, new Set(onWall.map(one => one.id)));
    else return;
    event.preventDefault();
  } else if (press(event)) event.preventDefault();
});

element("other").addEventListener("submit", async event => {
  event.preventDefault();
  const typed = element("typed");
  if (await label(typed.value, typedName)) {
    typed.value = "";
    typed.blur();
  }
});
element("to-teach").onclick = () => goTo("teach");
element("to-question").onclick = () => toQuestion();
element("to-wall").onclick = toWall;
element("to-heaps").onclick = toHeaps;
element("undo").onclick = undo;
element("before").onclick = () => turn(false);
element("after").onclick = () => turn(true);
