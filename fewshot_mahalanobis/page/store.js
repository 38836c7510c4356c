// Keeps what a visitor has taught in this browser, for the next visit: IndexedDB, one database for each page.
"use strict";

const TABLES = ["pictures", "state"]; // rows with an id; values by their names

let database = null; // none where the browser forbids it, as in a private window

async function openStore() {
  try {
    database = await new Promise((resolve, reject) => {
      const opening = indexedDB.open(`fewshot-mahalanobis ${location.pathname}`, 1);
      opening.onupgradeneeded = () => {
        opening.result.createObjectStore("pictures", {keyPath: "id"});
        opening.result.createObjectStore("state");
      };
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => reject(opening.error);
    });
    navigator.storage?.persist?.(); // else a browser that is short of space may forget them
  } catch (error) {
    console.warn("what is taught will be gone with this tab:", error);
  }
  return database !== null;
}

/** Run `change` on a table, and wait until it is kept; what its request gives. */
async function inStore(table, change) {
  if (!database) return undefined;
  const transaction = database.transaction(table, "readwrite");
  const request = change(transaction.objectStore(table));
  await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
  return request.result;
}

const storedPictures = async () => await inStore("pictures", table => table.getAll()) ?? [];
const storePicture = picture => inStore("pictures", table => table.put(picture));
const forgetPicture = id => inStore("pictures", table => table.delete(id));
const storedState = name => inStore("state", table => table.get(name));
const storeState = (name, value) => inStore("state", table => table.put(value, name));

async function forgetAll() {
  for (const table of TABLES) await inStore(table, one => one.clear());
}
