import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-web";

const session = await ort.InferenceSession.create(await readFile("model.onnx"));

const file = await readFile(process.argv[2]);
const [header, width, height] = file.toString("latin1").match(/^P6\s(\d+)\s(\d+)\s\d+\s/);
const pixels = new ort.Tensor("uint8", new Uint8Array(file.subarray(header.length)), [+height, +width, 3]);
const { label } = await session.run({ pixels });
console.log(label.data[0]);
