// Keeps the files of a page, so that it opens without a network. It answers for these files alone: with what the server
// has now, or with the kept ones if no server answers. Each version of a page has another digest here, and its files
// take the place of the earlier ones when all of them are there. From the second visit on the page may have several
// threads, as its answers have the headers for that, which few web servers send.
"use strict";

const MARK = "service worker of a page by fewshot-mahalanobis"; // stays, as every version looks for it
const CACHES = `${registration.scope} `; // what the names of this page's caches begin with
const CACHE = CACHES + "{{digest}}";
const FILES = {{files}}; // address and, of the large ones, integrity

// How to ask the server. The browser's copy of an earlier answer is offered to it only for large files, whose addresses
// have their digests: many servers compare dates alone, and take an older file of another site for the same one.
const asked = integrity => ({integrity, cache: integrity ? "no-cache" : "reload"});
const absolute = address => new URL(address, registration.scope).href;
const OWN = new Set(FILES.map(([address]) => absolute(address)));

addEventListener("install", event => event.waitUntil((async () => {
  const cache = await caches.open(CACHE);
  await Promise.all(FILES.map(async ([address, integrity]) => {
    const response = await fetch(absolute(address), asked(integrity));
    if (!response.ok) throw new Error(`${address}: ${response.status}`);
    await cache.put(absolute(address), new Response(response.body, response)); // itself no redirect, even after one
  }));
  await skipWaiting();
})()));

addEventListener("activate", event => event.waitUntil((async () => {
  await forget(name => name !== CACHE);
  await clients.claim();
})()));

addEventListener("fetch", event => {
  const {request} = event, address = fileOf(request);
  if (request.mode === "navigate") event.waitUntil(leaveIfGone());
  if (request.method === "GET" && OWN.has(address)) event.respondWith(
    fetch(request, asked(request.integrity))
      .catch(async () => await caches.match(address, {cacheName: CACHE}) ?? Response.error())
      .then(response => request.mode === "navigate" && response.ok ? isolated(response) : response));
});

/** A page that may have several threads. */
function isolated({body, status, statusText, headers}) {
  const added = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"};
  return new Response(body, {status, statusText, headers: {...Object.fromEntries(headers), ...added}});
}

/** The address of the file that a request is for: to visit the folder is to visit its index.html. */
function fileOf({mode, url}) {
  if (mode !== "navigate") return url;
  const {origin, pathname} = new URL(url);
  return origin + pathname === registration.scope ? absolute("index.html") : origin + pathname;
}

/** Unregister if a server answers, but no longer with this page: the address may belong to another one now. */
async function leaveIfGone() {
  const response = await fetch(location, asked("")).catch(() => null);
  if (!response || response.status >= 500 || (await response.text()).includes(MARK)) return;
  await registration.unregister();
  await forget(() => true);
}

/** Delete those of this page's caches whose names are chosen. */
async function forget(chosen) {
  const names = (await caches.keys()).filter(name => name.startsWith(CACHES) && chosen(name));
  await Promise.all(names.map(name => caches.delete(name)));
}
