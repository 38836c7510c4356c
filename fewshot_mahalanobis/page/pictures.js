// Pictures as the pixels that the graph reads, in every browser the same, and as in Python.
"use strict";

const STRIP = 256; // rows of a picture that are in memory at a time
// What a decoder needs of a PNG file. Without the rest it shows the default image of an animation, and applies neither
// gamma nor orientation: Python does not use the one, and `openPicture` has the other.
const PNG_CHUNKS = new Set(["IHDR", "PLTE", "tRNS", "iCCP", "sRGB", "IDAT", "IEND"]);
// a, b, c and d of the canvas transformation that turns a picture of EXIF orientation 1 to 8 upright.
const TURNS = [[1, 0, 0, 1], [-1, 0, 0, 1], [-1, 0, 0, -1], [1, 0, 0, -1], [0, 1, 1, 0], [0, 1, -1, 0], [0, -1, -1, 0],
  [0, -1, 1, 0]];

/** What a canvas can draw, of width x height pixels before it is turned upright. */
function pictureOf(source, width, height, orientation = 1) {
  if (orientation > 4) [width, height] = [height, width];
  return {source, width, height, turn: TURNS[orientation - 1]};
}

/** The picture in a file. Browsers apply the EXIF orientation in some formats only, so it is taken out of the file. */
async function openPicture(file) {
  const view = new DataView(await file.arrayBuffer());
  let parts = [view], orientation = 1;
  try {
    const start = ascii(view, 0, 4) + ascii(view, 8, 4);
    let exif;
    if (view.getUint16(0) === 0xffd8) exif = exifOfJpeg(view);
    else if (start.startsWith("\x89PNG")) ({exif, parts} = chunksOfPng(view));
    else if (start === "RIFFWEBP") exif = exifOfWebp(view);
    if (exif) orientation = takeOrientation(view, exif);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // it ends early, which the browser's decoder judges
  }
  const bitmap = await createImageBitmap(new Blob(parts));
  return pictureOf(bitmap, bitmap.width, bitmap.height, orientation);
}

function ascii(view, at, length) {
  return String.fromCharCode(...new Uint8Array(view.buffer, at, length));
}

function exifOfJpeg(view) {
  for (let at = 2; view.getUint8(at) === 0xff;) {
    const marker = view.getUint8(at + 1);
    if (marker === 0xda) break; // the pixels
    if (marker === 0xe1 && ascii(view, at + 4, 6) === "Exif\0\0") return at + 4;
    at += marker === 0xff ? 1 : 2 + view.getUint16(at + 2);
  }
}

function chunksOfPng(view) {
  const parts = [new Uint8Array(view.buffer, 0, 8)];
  let exif, kind;
  for (let at = 8, size; kind !== "IEND"; at += size) {
    size = 12 + view.getUint32(at);
    kind = ascii(view, at + 4, 4);
    if (kind === "eXIf") exif = at + 8;
    if (PNG_CHUNKS.has(kind)) parts.push(new Uint8Array(view.buffer, at, size));
  }
  return {exif, parts};
}

function exifOfWebp(view) {
  for (let at = 12, size; at < view.byteLength; at += 8 + size + size % 2) {
    size = view.getUint32(at + 4, true);
    if (ascii(view, at, 4) === "EXIF") return at + 8;
  }
}

/** The orientation (1 to 8) in EXIF data, where it becomes 1. */
function takeOrientation(view, start) {
  if (ascii(view, start, 6) === "Exif\0\0") start += 6;
  const little = ascii(view, start, 2) === "II";
  const entries = start + view.getUint32(start + 4, little);
  for (let left = view.getUint16(entries, little), at = entries + 2; left > 0; left--, at += 12) {
    if (view.getUint16(at, little) !== 0x0112) continue;
    const orientation = view.getUint16(at + 8, little);
    view.setUint16(at + 8, 1, little);
    return orientation >= 1 && orientation <= 8 ? orientation : 1;
  }
  return 1;
}

/** Draw a picture upright in its own size, in the canvas's present coordinates. */
function drawUpright(context, {source, width, height, turn: [a, b, c, d]}) {
  context.transform(a, b, c, d, a + c < 0 ? width : 0, b + d < 0 ? height : 0);
  context.drawImage(source, 0, 0);
}

/** The square (3, side, side) that the network reads of a picture, 8-bit RGB, from the same pixels the same as Pillow
 *  makes it for `predict`: blocks of 2^k x 2^k pixels become their mean, k as large as leaves both sides at least twice
 *  as long as the square's, and an antialiased bilinear filter resizes the rest. */
function squareOf(picture, side) {
  const times = Math.floor(Math.min(picture.width, picture.height) / (2 * side));
  const {pixels, width, height} = pixelsOf(picture, times > 1 ? 1 << (31 - Math.clz32(times)) : 1);
  const rows = resized(resized(pixels, height, width, 3, side), 1, height, 3 * side, side);
  return Uint8Array.from(rows, (_, index) => rows[index % (side * side) * 3 + Math.floor(index / (side * side))]);
}

/** The pixels (height, width, 3) of a picture on white, RGB, each the mean of a block. */
function pixelsOf(picture, block) {
  const {width, height} = picture;
  const columns = Math.ceil(width / block), rows = Math.ceil(height / block);
  const pixels = new Uint8Array(rows * columns * 3);
  const strip = Math.ceil(STRIP / block) * block;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = Math.min(strip, height);
  const context = canvas.getContext("2d", {willReadFrequently: true, alpha: false});
  context.fillStyle = "white";
  context.imageSmoothingEnabled = false; // each pixel as it is
  let place = 0;
  for (let top = 0; top < height; top += strip) {
    const lines = Math.min(strip, height - top);
    context.resetTransform();
    context.fillRect(0, 0, width, lines);
    context.translate(0, -top);
    drawUpright(context, picture);
    const {data} = context.getImageData(0, 0, width, lines);
    for (let y = 0; y < lines; y += block) {
      const down = Math.min(block, lines - y);
      for (let x = 0; x < width; x += block) {
        const across = Math.min(block, width - x);
        let red = 0, green = 0, blue = 0;
        for (let j = 0; j < down; j++) {
          for (let i = 0, at = 4 * ((y + j) * width + x); i < across; i++, at += 4) {
            red += data[at];
            green += data[at + 1];
            blue += data[at + 2];
          }
        }
        const count = down * across, part = Math.floor(2 ** 24 / count); // rounded as in Pillow
        for (const total of [red, green, blue]) pixels[place++] = (total + (count >> 1)) * part / 2 ** 24;
      }
    }
  }
  return {pixels, height: rows, width: columns};
}

/** Numbers (rows, length, inner) of 8 bits -> (rows, size, inner): sums under a triangle that is as wide as two pixels
 *  of the result, or of the picture where it grows. Weights are whole numbers of 2^-22, as in Pillow. */
function resized(numbers, rows, length, inner, size) {
  if (length === size) return numbers;
  const found = new Uint8ClampedArray(rows * size * inner), scale = length / size, reach = Math.max(scale, 1);
  for (let place = 0; place < size; place++) {
    const centre = (place + 0.5) * scale, first = Math.max(Math.floor(centre - reach + 0.5), 0);
    const count = Math.min(Math.floor(centre + reach + 0.5), length) - first;
    const heights = Array.from({length: count}, (_, i) => Math.max(1 - Math.abs(first + i + 0.5 - centre) / reach, 0));
    const total = heights.reduce((one, other) => one + other, 0);
    const weights = Int32Array.from(heights, height => height / total * 2 ** 22 + 0.5);
    for (let row = 0; row < rows; row++) {
      const from = (row * length + first) * inner, to = (row * size + place) * inner;
      for (let i = 0; i < inner; i++) {
        let value = 2 ** 21;
        for (let j = 0; j < count; j++) value += weights[j] * numbers[from + j * inner + i];
        found[to + i] = value >> 22;
      }
    }
  }
  return found;
}

