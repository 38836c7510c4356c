// Keeps the page and all that it needs, so that it opens without a network. A new version of the page has another
// digest here; it is fetched whole beside the old one, and takes its place when no tab shows the old one any more.
"use strict";

const CACHE = `${registration.scope} {{digest}}`;
const FILES = {{files}}; // address and, of the large ones, integrity

addEventListener("install", event => event.waitUntil(caches.open(CACHE).then(cache =>
  Promise.all(FILES.map(async ([address, integrity]) => {
    const own = new URL(address, location).origin === location.origin;
    const response = await fetch(new Request(address, {integrity, cache: own ? "no-cache" : "default"}));
    if (!response.ok) throw new Error(`${address}: ${response.status}`);
    await cache.put(address, response);
  })))));

addEventListener("activate", event => event.waitUntil((async () => {
  const old = (await caches.keys()).filter(name => name.startsWith(`${registration.scope} `) && name !== CACHE);
  await Promise.all(old.map(name => caches.delete(name)));
  await clients.claim();
})()));

addEventListener("fetch", event => {
  const {request} = event;
  if (request.method !== "GET") return;
  const asked = request.mode === "navigate" ? new Request("./") : request;
  event.respondWith((async () =>
    await (await caches.open(CACHE)).match(asked, {ignoreSearch: true, ignoreVary: true}) ?? fetch(request))());
});
