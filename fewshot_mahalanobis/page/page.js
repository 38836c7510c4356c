// What all pages share: answers, camera, files that are chosen, dropped or pasted.
"use strict";

const BARS = 5; // probabilities that are shown of an answer
const KEYS = 9; // classes that have a key
const NEAREST = 6; // nearest pictures that are shown of an answer
const THUMBNAIL = 192;

const element = id => document.getElementById(id);
const percent = share => share.toLocaleString("en", {style: "percent"});

function say(text, problem = false) {
  element("status").textContent = text;
  element("status").classList.toggle("problem", problem);
}

// ---------------------------------------------------------------- showing

/** "Answers to 3 pictures: 2 cat, 1 unknown." */
function summary(labels) {
  const counts = new Map();
  for (const label of labels.filter(one => one !== null)) counts.set(label, (counts.get(label) ?? 0) + 1);
  const parts = [...counts].sort((one, other) => other[1] - one[1]).map(([label, count]) => `${count} ${label}`);
  const pictures = `${labels.length} ${labels.length === 1 ? "picture" : "pictures"}`;
  return parts.length ? `Answers to ${pictures}: ${parts.join(", ")}.` : `${pictures}.`;
}

function fromTemplate(id) {
  return element(id).content.cloneNode(true).firstElementChild;
}

/** Empty cards, in the order of the names, above those that are there. */
function addCards(names) {
  const cards = names.map(name => {
    const card = fromTemplate("answer");
    card.querySelector(".name").textContent = name;
    card.querySelector("canvas").setAttribute("aria-label", name);
    return card;
  });
  element("answers").prepend(...cards);
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

/** Show an answer: its probabilities of `labels`, after which the unknown label comes if there is one. */
function showAnswer(place, {probabilities, label, ...grade}, labels) {
  const order = [...probabilities.keys()].sort((one, other) => probabilities[other] - probabilities[one]);
  const unknown = label === probabilities.length, best = labels[order[0]];
  setText(place.querySelector(".label"), labels[label]);
  place.classList.toggle("unknown", unknown);
  setText(place.querySelector(".text"), unknown
    ? `It is unlike the pictures of every class. The most probable one is ${best}, ${percent(probabilities[order[0]])}.`
    : `${percent(probabilities[label])} probable`);
  place.querySelector(".text").classList.remove("problem");
  setText(place.querySelector(".grade"), inGrades(grade));
  place.querySelector(".bars").replaceChildren(...order.slice(0, BARS).map(index => {
    const row = document.createElement("li"), bar = document.createElement("div"), filled = document.createElement("div");
    bar.className = "bar";
    filled.style.width = `${100 * probabilities[index]}%`;
    bar.append(filled);
    row.append(textElement("span", labels[index]), bar, textElement("span", percent(probabilities[index])));
    return row;
  }));
}

/** How far a picture is from being called unknown, or from not being, and how near its answer is to another. */
function inGrades({score = null, threshold = null, doubt = null}) {
  const rounded = number => number.toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2});
  const parts = [];
  if (threshold !== null) parts.push(`Outlier score ${rounded(score)}, unknown above ${rounded(threshold)}.`);
  if (doubt !== null) parts.push(`Doubt ${percent(doubt)}.`);
  return parts.join(" ");
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

/** Show the camera, and each frame to `see`, one after the other, as fast as it comes back. */
async function startCamera(see) {
  stopCamera();
  const video = element("video");
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
    while (stream === opened) {
      if (video.videoWidth) await see(pictureOf(video, video.videoWidth, video.videoHeight));
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
  stream = element("video").srcObject = null;
  element("live").hidden = true;
  element("camera").hidden = false;
  element("camera").focus();
}

/** The camera's frame as a picture of its own, with a name; null if there is none yet. */
async function presentFrame() {
  const video = element("video");
  if (!video.videoWidth) return null;
  const bitmap = await createImageBitmap(video);
  return {picture: pictureOf(bitmap, bitmap.width, bitmap.height), name: `camera, ${new Date().toLocaleTimeString()}`};
}

// ---------------------------------------------------------------- the visitor

/** Call `see` with each frame of the camera once the visitor starts it, and `take` with those that are to be kept. */
function offerCamera(see, take) {
  element("camera").addEventListener("click", () => startCamera(see));
  element("stop").addEventListener("click", stopCamera);
  element("keep").addEventListener("click", async () => {
    const frame = await presentFrame();
    if (frame) await take(frame);
  });
  element("turn").addEventListener("click", () => {
    facing = facing === "environment" ? "user" : "environment";
    startCamera(see);
  });
  element("camera").hidden = !navigator.mediaDevices; // needs https
}

/** Call `take` with the files that are chosen in an input. */
function whenChosen(input, take) {
  input.addEventListener("change", event => {
    take([...event.target.files]);
    event.target.value = ""; // so that the same file can be chosen again
  });
}

/** Call `take` with files that are dropped or pasted anywhere, and with where. */
function whenDropped(take) {
  addEventListener("paste", event => take([...event.clipboardData.files], document.activeElement));
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
    take([...event.dataTransfer.files], event.target);
  });
}

addEventListener("beforeinstallprompt", event => {
  event.preventDefault();
  element("install").hidden = false;
  element("install").onclick = () => event.prompt();
});
addEventListener("appinstalled", () => { element("install").hidden = true; });
