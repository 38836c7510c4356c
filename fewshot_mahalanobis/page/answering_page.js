// Makes an answering page of what was taught: a zip of this page's own files, with others in place of those that teach.
"use strict";

const OF_TEACHING = ["index.html", "answers.html", "learn.js", "correct.js", "browser.js", "store.js", "answering_page.js",
  "learning_curve.js", "same_picture.js", "which_next.js", "film.onnx"];
const CRC_TABLE = Uint32Array.from({length: 256}, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? 0xedb88320 ^ (byte >>> 1) : byte >>> 1;
  return byte;
});

const text = content => new TextEncoder().encode(content);
const escaped = content => content.replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`);

/** A zip (Blob) of an answering page: its title, a classifier's file (Blob), its labels and number of pictures. */
async function answeringPage(title, classifier, {labels, unknown, examples}) {
  const {made_by, side, positions, runtime, features} = page, files = {};
  const kept = Object.fromEntries([features, ...Object.values(runtime)].map(file => [nameOf(file), file]));
  for (const name of page.files.filter(name => !OF_TEACHING.includes(name))) {
    files[name] = new Uint8Array(await (await get(kept[name] ?? {address: name})).arrayBuffer());
  }
  files["classifier.safetensors"] = new Uint8Array(await classifier.arrayBuffer());
  const index = await (await get({address: "answers.html"})).text(), most = labels.slice(0, 20).join(", ");
  const about = `Tells pictures of these ${labels.length} classes apart: ${most}${labels.length > 20 ? " and others" : ""}.`;
  const learned = `It has learned from ${examples} pictures. ` + (unknown === null
    ? "It knows these classes alone: a picture of anything else gets one of them too."
    : `A picture that is unlike all of them gets “${unknown}”.`);
  const places = Object.entries({title, about, learned});
  files["index.html"] = text(places.reduce((html, [name, content]) =>
    html.replaceAll(`{{${name}}}`, () => escaped(content)), index));
  const manifest = JSON.parse(new TextDecoder().decode(files["manifest.json"]));
  files["manifest.json"] = text(JSON.stringify({...manifest, name: title, short_name: title}));
  const own = await largeFile("classifier.safetensors", files["classifier.safetensors"]);
  const bytes = [features, own].reduce((total, file) => total + files[nameOf(file)].length, page.runtime_bytes);
  const described = {made_by, title, side, runtime, features, classifier: own, positions, bytes, support: null,
    labels: [...labels, ...(unknown === null ? [] : [unknown])], files: Object.keys(files).sort()};
  files["page.json"] = text(JSON.stringify(described));
  files["service-worker.js"] = await serviceWorker(files, [own, features, ...Object.values(runtime)]);
  return zipOf(files);
}

const nameOf = ({address}) => address.split("?")[0];

/** Address and integrity of a file, as the page's own large files have them. */
async function largeFile(name, bytes) {
  const digest = btoa(String.fromCharCode(...new Uint8Array(await crypto.subtle.digest("SHA-384", bytes))));
  return {address: `${name}?${digest.slice(0, 16)}`, integrity: `sha384-${digest}`};
}

/** The page's service worker, with the files of the new page. */
async function serviceWorker(files, large) {
  const named = large.map(nameOf);
  const kept = [...Object.keys(files).filter(name => !named.includes(name)).map(name => [name, ""]),
    ...large.map(({address, integrity}) => [address, integrity])];
  const digest = (await largeFile("", files["page.json"])).integrity.replace(/\W/g, "").slice(6, 22);
  const script = new TextDecoder().decode(files["service-worker.js"]);
  return text(script.replace(/(const CACHE = CACHES \+ ")\w+/, `$1${digest}`)
    .replace(/const FILES = \[[^]*?\n\];/, () => `const FILES = ${JSON.stringify(kept, null, 2)};`));
}

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = CRC_TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

/** A zip file of files {name: bytes}, which are not compressed: most of them are weights. */
function zipOf(files) {
  const parts = [], directory = [];
  let start = 0;
  for (const [name, bytes] of Object.entries(files)) {
    const encoded = text(name);
    // Version 2.0, names in UTF-8, no compression, 1 January 1980.
    const common = [20, 0x0800, 0, 0, 0x21, crc32(bytes), bytes.length, bytes.length, encoded.length, 0];
    const sizes = [2, 2, 2, 2, 2, 4, 4, 4, 2, 2];
    const local = record([0x04034b50, ...common], [4, ...sizes]);
    directory.push(record([0x02014b50, 20, ...common, 0, 0, 0, 0, start], [4, 2, ...sizes, 2, 2, 2, 4, 4]), encoded);
    parts.push(local, encoded, bytes);
    start += local.length + encoded.length + bytes.length;
  }
  const size = directory.reduce((total, part) => total + part.length, 0), count = Object.keys(files).length;
  const end = record([0x06054b50, 0, 0, count, count, size, start, 0], [4, 2, 2, 2, 2, 4, 4, 2]);
  return new Blob([...parts, ...directory, end], {type: "application/zip"});
}

/** Numbers of so many bytes each, little-endian. */
function record(numbers, sizes) {
  const bytes = [];
  numbers.forEach((number, index) => {
    for (let i = 0; i < sizes[index]; i++) bytes.push(Math.floor(number / 256 ** i) & 0xff);
  });
  return Uint8Array.from(bytes);
}
