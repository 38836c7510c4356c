// Classifies pictures in this browser. The Content-Security-Policy of index.html lets the page connect to nothing but
// its own folder and the runtime's address, and nothing here sends anything.
"use strict";

const BARS = 5, NEAREST = 6; // probabilities and nearest pictures that are shown of an answer
const THUMBNAIL = 192;

const element = id => document.getElementById(id);
const [line, answers, video, template] = ["status", "answers", "video", "answer"].map(element);
const percent = share => share.toLocaleString("en", {style: "percent"});
const megabytes = bytes => Math.ceil(bytes / 1e6);

let page; // what page.json has
let worker;

function say(text, problem = false) {
  line.textContent = text;
  line.classList.toggle("problem", problem);
}

// ---------------------------------------------------------------- loading

async function load() {
  if (location.protocol === "file:") {
    throw new Error("This page works from a web server, not as an opened file. In its folder, run "
      + "“python3 -m http.server --bind 127.0.0.1” and open http://127.0.0.1:8000.");
  }
  page = await (await get({address: "page.json"})).json();
  say(`Loading the classifier: ${megabytes(page.bytes)} MB, only on the first visit …`);
  const kept = await keep();
  const [script, wasm, graph] = await Promise.all([page.runtime.script, page.runtime.wasm, page.graph].map(
    async file => (await get(file)).arrayBuffer()));
  const code = await (await get({address: "worker.js"})).blob();
  worker = new Worker(URL.createObjectURL(new Blob([code], {type: "text/javascript"})), {type: "module"});
  await ask({script, wasm, graph}, [script, wasm, graph]);
  if (kept) element("offline").textContent = "It also works without a network.";
  say("Ready.");
}

async function get({address, integrity = ""}) {
  let response;
  try {
    response = await fetch(address, {integrity, cache: integrity ? "no-cache" : "reload"});
  } catch {
    response = {ok: false, status: integrity ? "no network, or the file is not the one that the page was made with"
      : "no network"};
  }
  if (!response.ok) throw new Error(`${address.split("?")[0]} could not be loaded (${response.status}).`);
  return response;
}

/** Let the service worker fetch everything, once, before the page asks for it; is there one? */
async function keep() {
  if (!navigator.serviceWorker) return false; // no https, or the browser forbids it
  try {
    const registration = await navigator.serviceWorker.register("service-worker.js");
    const first = registration.installing;
    if (registration.active || !first) return true;
    await new Promise((resolve, reject) => {
      first.addEventListener("statechange", () => {
        if (first.state === "activated") resolve();
        if (first.state === "redundant") reject(new Error("it could not fetch everything"));
      });
    });
    return true;
  } catch (error) {
    console.warn("without a service worker the page needs the network:", error);
    return false;
  }
}

/** What the worker answers to a message. */
function ask(message, transfer) {
  const {port1, port2} = new MessageChannel();
  return new Promise((resolve, reject) => {
    port1.onmessage = ({data}) => "problem" in data ? reject(new Error(data.problem)) : resolve(data.result);
    worker.onerror = event => reject(new Error(event.message || "The classifier could not be started."));
    worker.postMessage(message, [...transfer, port2]);
  });
}

// ---------------------------------------------------------------- classifying

async function classify(picture) {
  const input = pixelsOf(picture, page.side);
  const {probabilities, label: [label], distances} = await ask(input, [input.pixels.buffer]);
  return {probabilities, label, distances};
}

async function classifyFiles(files) {
  if (!files.length) return;
  say(files.length === 1 ? "Classifying the picture …" : `Classifying ${files.length} pictures …`);
  const cards = addCards(files.map(file => file.name));
  const labels = [];
  try {
    await ready;
  } catch { // the page says why
    return cards.forEach(card => showProblem(card, "The classifier could not be loaded."));
  }
  for (const [index, file] of files.entries()) {
    let picture;
    try {
      picture = await openPicture(file);
    } catch {
      showProblem(cards[index], "This browser cannot open it as a picture.");
      continue;
    }
    labels.push(await answer(cards[index], picture, files.length === 1));
  }
  const unreadable = files.length - labels.length;
  say(summary(labels) + (unreadable ? ` ${unreadable} could not be opened.` : ""));
}

/** Classify a picture and fill its card; the label, or null if that fails. */
async function answer(card, picture, open) {
  drawThumbnail(card.querySelector("canvas"), picture);
  try {
    const found = await classify(picture);
    showAnswer(card, found);
    showNearest(card, found);
    card.querySelector("details").hidden = false;
    card.querySelector("details").open = open;
    return page.labels[found.label];
  } catch (error) {
    showProblem(card, `It could not be classified: ${error.message}`);
    return null;
  } finally {
    picture.source.close();
  }
}

// ---------------------------------------------------------------- showing

/** "3 pictures: 2 cat, 1 unknown." */
function summary(labels) {
  const counts = new Map();
  for (const label of labels.filter(one => one !== null)) counts.set(label, (counts.get(label) ?? 0) + 1);
  const parts = [...counts].sort((one, other) => other[1] - one[1]).map(([label, count]) => `${count} ${label}`);
  return `${labels.length} ${labels.length === 1 ? "picture" : "pictures"}${parts.length ? ": " : ""}${parts.join(", ")}.`;
}

/** Empty cards, in the order of the names, above those that are there. */
function addCards(names) {
  const cards = names.map(name => {
    const card = template.content.cloneNode(true).firstElementChild;
    card.querySelector(".name").textContent = name;
    card.querySelector("canvas").setAttribute("aria-label", name);
    return card;
  });
  answers.prepend(...cards);
  element("asked").hidden = false;
  return cards;
}

function drawThumbnail(canvas, picture) {
  const scale = Math.min(1, THUMBNAIL / Math.max(picture.width, picture.height));
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white"; // behind a transparent picture, as the network sees it
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(canvas.width / picture.width, canvas.height / picture.height);
  drawUpright(context, picture);
}

function showAnswer(place, {probabilities, label}) {
  const order = [...probabilities.keys()].sort((one, other) => probabilities[other] - probabilities[one]);
  const unknown = label === probabilities.length, best = page.labels[order[0]];
  setText(place.querySelector(".label"), page.labels[label]);
  place.classList.toggle("unknown", unknown);
  setText(place.querySelector(".text"), unknown
    ? `It is unlike the pictures of every class. The nearest class is ${best}.`
    : `${percent(probabilities[label])} probable`);
  place.querySelector(".bars").replaceChildren(...order.slice(0, BARS).map(index => {
    const row = document.createElement("li"), bar = document.createElement("div"), filled = document.createElement("div");
    bar.className = "bar";
    filled.style.width = `${100 * probabilities[index]}%`;
    bar.append(filled);
    row.append(textElement("span", page.labels[index]), bar, textElement("span", percent(probabilities[index])));
    return row;
  }));
}

function showNearest(card, {distances}) {
  if (!page.support) return;
  const order = [...distances.keys()].filter(index => page.support[index].picture);
  order.sort((one, other) => distances[one] - distances[other]);
  card.querySelector(".pictures").replaceChildren(...order.slice(0, NEAREST).map(index => {
    const {label, picture} = page.support[index];
    const item = document.createElement("li"), image = document.createElement("img");
    image.src = picture;
    image.alt = "";
    item.append(image, textElement("span", label));
    return item;
  }));
  card.querySelector(".nearest").hidden = !order.length;
}

function showProblem(card, text) {
  card.querySelector("canvas").hidden = true;
  card.querySelector(".label").textContent = "No answer";
  card.querySelector(".text").textContent = text;
  card.querySelector(".text").classList.add("problem");
}

function textElement(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

/** Only if it is another text: screen readers read out every change. */
function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// ---------------------------------------------------------------- camera

let stream = null, facing = "environment";

async function startCamera() {
  stopCamera();
  let opened;
  try {
    opened = await navigator.mediaDevices.getUserMedia({video: {facingMode: facing}});
  } catch (error) {
    return say(`The camera cannot be used: ${error.message}`, true);
  }
  stream = opened;
  video.srcObject = opened;
  await video.play();
  const cameras = (await navigator.mediaDevices.enumerateDevices()).filter(device => device.kind === "videoinput");
  element("turn").hidden = cameras.length < 2;
  element("live").hidden = false;
  element("camera").hidden = true;
  element("keep").focus();
  try {
    await ready;
    while (stream === opened) { // one frame after the other, as fast as they are classified
      if (video.videoWidth) {
        showAnswer(element("live"), await classify(pictureOf(video, video.videoWidth, video.videoHeight)));
      }
      await new Promise(requestAnimationFrame); // waits while the page is in the background
    }
  } catch (error) {
    stopCamera();
    say(error.message, true);
  }
}

function stopCamera() {
  if (!stream) return;
  for (const track of stream.getTracks()) track.stop();
  stream = video.srcObject = null;
  element("live").hidden = true;
  element("camera").hidden = false;
  element("camera").focus();
}

async function keepFrame() {
  if (!video.videoWidth) return;
  const bitmap = await createImageBitmap(video);
  const [card] = addCards([`camera, ${new Date().toLocaleTimeString()}`]);
  say(summary([await answer(card, pictureOf(bitmap, bitmap.width, bitmap.height), true)]));
}

// ---------------------------------------------------------------- the visitor

element("files").addEventListener("change", event => {
  classifyFiles([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
});
addEventListener("paste", event => classifyFiles([...event.clipboardData.files]));
addEventListener("dragover", event => {
  event.preventDefault();
  document.body.classList.add("over");
});
addEventListener("dragleave", event => {
  if (!event.relatedTarget) document.body.classList.remove("over");
});
addEventListener("drop", event => {
  event.preventDefault();
  document.body.classList.remove("over");
  classifyFiles([...event.dataTransfer.files]);
});
element("camera").addEventListener("click", startCamera);
element("stop").addEventListener("click", stopCamera);
element("keep").addEventListener("click", keepFrame);
element("turn").addEventListener("click", () => {
  facing = facing === "environment" ? "user" : "environment";
  startCamera();
});
element("clear").addEventListener("click", () => {
  answers.replaceChildren();
  element("asked").hidden = true;
  say("Ready.");
  element("files").focus();
});
addEventListener("beforeinstallprompt", event => {
  event.preventDefault();
  element("install").hidden = false;
  element("install").onclick = () => event.prompt();
});
addEventListener("appinstalled", () => { element("install").hidden = true; });
element("camera").hidden = !navigator.mediaDevices; // needs https

const ready = load();
ready.catch(error => say(error.message, true));
