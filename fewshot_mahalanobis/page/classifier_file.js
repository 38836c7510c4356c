// The file that SimpleCNAPSClassifier.load reads, as `checkpoints/classifier_file.py` describes it.
"use strict";

const FORMAT = "fewshot_mahalanobis.SimpleCNAPSClassifier", VERSION = 1;
const TYPES = {F16: ["torch.float16", 2], BF16: ["torch.bfloat16", 2], F32: ["torch.float32", 4], I64: ["torch.int64", 8]};

/** Tensors {name: {dtype, shape, bytes}} and header of a file (ArrayBuffer). */
function readClassifier(file) {
  let description, header;
  try {
    const length = Number(new DataView(file).getBigUint64(0, true));
    description = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
    const {format, classifier} = description.__metadata__;
    if (format !== FORMAT) throw new Error(format);
    header = JSON.parse(classifier);
    delete description.__metadata__;
    const tensors = Object.fromEntries(Object.entries(description).map(([name, {dtype, shape, data_offsets: [start, end]}]) =>
      [name, {dtype, shape, bytes: new Uint8Array(file, 8 + length + start, end - start)}]));
    if (header.version <= VERSION) return {tensors, header};
  } catch {
    throw new Error("It is not a file of a fitted classifier, or it is damaged.");
  }
  throw new Error("It was written by a newer version: make this page anew with that.");
}

/** A float tensor as numbers. */
function numbersOf({dtype, bytes}) {
  const own = bytes.slice().buffer; // aligned
  if (dtype === "F32") return new Float32Array(own);
  if (dtype === "F16") return Float32Array.from(new Uint16Array(own), fromFloat16);
  throw new Error(`It has numbers of type ${dtype}, which this page cannot read.`);
}

function fromFloat16(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * fraction / 1024);
}

const integersOf = ({bytes}) => Array.from(new BigInt64Array(bytes.slice().buffer), Number);

function floatTensor(numbers, shape) {
  return {dtype: "F32", shape, bytes: new Uint8Array(Float32Array.from(numbers).buffer)};
}

function integerTensor(integers) {
  return {dtype: "I64", shape: [integers.length], bytes: new Uint8Array(BigInt64Array.from(integers, BigInt).buffer)};
}

/** SHA-256 of the names, types, shapes and bytes of tensors, in hexadecimal. */
async function digestOf(tensors) {
  const parts = [];
  for (const name of Object.keys(tensors).sort()) {
    const {dtype, shape, bytes} = tensors[name], sizes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
    parts.push(new TextEncoder().encode(`${name} ${TYPES[dtype][0]} (${sizes})\n`), bytes);
  }
  const digest = await crypto.subtle.digest("SHA-256", await new Blob(parts).arrayBuffer());
  return Array.from(new Uint8Array(digest), byte => byte.toString(16).padStart(2, "0")).join("");
}

/** A file of tensors and a header, to which their digest is added. */
async function writeClassifier(tensors, header) {
  const classifier = JSON.stringify({...header, digest: await digestOf(tensors)});
  const description = {__metadata__: {format: FORMAT, classifier}};
  const size = name => TYPES[tensors[name].dtype][1];
  const order = Object.keys(tensors).sort((one, other) => size(other) - size(one)); // each aligned
  let end = 0;
  for (const name of order) {
    const {dtype, shape, bytes} = tensors[name];
    description[name] = {dtype, shape, data_offsets: [end, end += bytes.length]};
  }
  const text = new TextEncoder().encode(JSON.stringify(description)), length = Math.ceil(text.length / 8) * 8;
  const start = new Uint8Array(8 + length).fill(0x20);
  new DataView(start.buffer).setBigUint64(0, BigInt(length), true);
  start.set(text, 8);
  return new Blob([start, ...order.map(name => tensors[name].bytes)], {type: "application/octet-stream"});
}
