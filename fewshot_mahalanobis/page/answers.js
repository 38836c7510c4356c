// Classifies pictures in this browser: by one graph of network and head, which Python has made, or by the network's graph
// and a classifier's file, on a page that was made by the one that is taught.
"use strict";

// ---------------------------------------------------------------- classifying

async function classify(picture) {
  const square = squareOf(picture, page.side);
  if (!page.graph) return decide(square, learned);
  const outputs = await ask({job: "run", graph: "graph", inputs: {images: imagesOf(square)}});
  const {probabilities, label, distances = []} = outputs;
  return {probabilities: [...probabilities], label: Number(label[0]), distances: [...distances]};
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
    showAnswer(card, found, page.labels);
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

// ---------------------------------------------------------------- the visitor

whenChosen(element("files"), classifyFiles);
whenDropped(classifyFiles);
offerCamera(async picture => {
  await ready;
  showAnswer(element("live"), await classify(picture), page.labels);
}, async ({picture, name}) => {
  const [card] = addCards([name]);
  say(summary([await answer(card, picture, true)]));
});
element("clear").addEventListener("click", () => {
  element("answers").replaceChildren();
  element("asked").hidden = true;
  say("Ready.");
  element("files").focus();
});

let learned; // what a file has, as `decide` takes it

async function load() {
  await loadPage(({graph, features}) =>
    graph ? {graph} : {headCode: {address: "head.js"}, features});
  if (!page.graph) {
    const {tensors, header} = readClassifier(await (await get(page.classifier)).arrayBuffer());
    const table = supportOf(tensors), {settled: {settings}, temperature, priors, threshold, units} = header.fitted;
    const outliers = threshold === null ? null : {threshold, units};
    learned = {number: 0, film: filmOf(tensors), table};
    await ask({job: "restore", number: 0, support: table, fit: {settings, temperature, priors, outliers}});
  }
  say("Ready.");
}

const ready = load();
ready.catch(error => say(error.message, true));
