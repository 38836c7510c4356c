// Runs the graph beside the page, so that the page stays responsive. It is started from a blob: only then does the
// page's Content-Security-Policy hold here too.
"use strict";

let runtime, session, last = Promise.resolve();

async function start({script, wasm, graph}) {
  runtime = await import(URL.createObjectURL(new Blob([script], {type: "text/javascript"})));
  runtime.env.wasm.wasmBinary = wasm;
  runtime.env.wasm.numThreads = 1; // more threads need headers that few web servers send
  session = await runtime.InferenceSession.create(new Uint8Array(graph), {executionProviders: ["wasm"]});
}

async function classify({pixels, height, width}) {
  const outputs = await session.run({pixels: new runtime.Tensor("uint8", pixels, [height, width, 3])});
  return Object.fromEntries(session.outputNames.map(name => [name, Array.from(outputs[name].data, Number)]));
}

// One message at a time: a session runs one picture after the other.
onmessage = ({data, ports: [reply]}) => {
  last = last.then(() => data.graph ? start(data) : classify(data)).then(
    result => reply.postMessage({result}), error => reply.postMessage({problem: String(error)}));
};
