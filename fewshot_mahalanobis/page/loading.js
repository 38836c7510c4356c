// Loads a page without a server behind it: its description, its large files, and the worker that runs them. The
// Content-Security-Policy lets a page connect to nothing but its own folder and the runtime's address.
"use strict";

const megabytes = bytes => Math.ceil(bytes / 1e6);

let page; // what page.json has
let worker;

/** Load the page's description and large files, and start the worker with those that `filesOf` the description names. */
async function loadPage(filesOf) {
  if (location.protocol === "file:") {
    throw new Error("This page works from a web server, not as an opened file. In its folder, run "
      + "“python3 -m http.server --bind 127.0.0.1” and open http://127.0.0.1:8000.");
  }
  page = await (await get({address: "page.json"})).json();
  say(`Loading the classifier: ${megabytes(page.bytes)} MB, only on the first visit …`);
  const kept = await keep();
  const files = Object.entries({...page.runtime, ...filesOf(page)});
  const loaded = await Promise.all(files.map(async ([name, file]) => [name, await (await get(file)).arrayBuffer()]));
  const code = await (await get({address: "worker.js"})).blob();
  worker = new Worker(URL.createObjectURL(new Blob([code], {type: "text/javascript"})), {type: "module"});
  await ask({job: "start", ...Object.fromEntries(loaded)}, loaded.map(([, bytes]) => bytes));
  if (kept) element("offline").textContent = "It also works without a network.";
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
function ask(message, transfer = []) {
  const {port1, port2} = new MessageChannel();
  return new Promise((resolve, reject) => {
    port1.onmessage = ({data}) => "problem" in data ? reject(new Error(data.problem)) : resolve(data.result);
    worker.onerror = event => reject(new Error(event.message || "The classifier could not be started."));
    worker.postMessage(message, [...transfer, port2]);
  });
}
