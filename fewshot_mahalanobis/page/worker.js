// Runs graphs, and on a page that is taught the head, beside the page, so that the page stays responsive. It is started
// from a blob: only then does the page's Content-Security-Policy hold here too.
"use strict";

let runtime, head, curve, same, which, last = Promise.resolve();
const sessions = {}, heads = new Map(); // fitted heads by their numbers: the newest, and the one before

const imported = code => import(URL.createObjectURL(new Blob([code], {type: "text/javascript"})));

const jobs = {
  /** Load the runtime, what code there is beside, and graphs by their names. */
  async start({script, wasm, headCode, curveCode, sameCode, nextCode, ...graphs}) {
    runtime = await imported(script);
    runtime.env.wasm.wasmBinary = wasm;
    // Several threads need headers that few web servers send (COOP and COEP).
    runtime.env.wasm.numThreads = crossOriginIsolated ? navigator.hardwareConcurrency : 1;
    if (headCode) head = await imported(headCode);
    if (curveCode) curve = await imported(curveCode);
    if (sameCode) same = await imported(sameCode);
    if (nextCode) which = await imported(nextCode);
    for (const [name, graph] of Object.entries(graphs)) {
      sessions[name] = await runtime.InferenceSession.create(new Uint8Array(graph), {executionProviders: ["wasm"]});
    }
  },

  /** Run a graph on inputs, each a type, an array and a shape; its outputs as arrays. */
  async run({graph, inputs}) {
    const tensors = Object.entries(inputs).map(([name, tensor]) => [name, new runtime.Tensor(...tensor)]);
    const outputs = await sessions[graph].run(Object.fromEntries(tensors));
    return Object.fromEntries(sessions[graph].outputNames.map(name => [name, outputs[name].data]));
  },

  /** Fit the head to a support set; the accuracy on its examples, each left out in turn. */
  async fit({number, support, options}) {
    const {features, labels, groups} = support, fitted = head.FittedHead.fit(support, {...options, twins: true});
    const logits = head.leaveOneOutLogits(fitted.settings, features, labels, groups);
    heads.set(number, {fitted, support, logits});
    for (const earlier of [...heads.keys()].slice(0, -2)) heads.delete(earlier);
    const counted = [...labels.keys()].filter(index => logits[index][labels[index]] > -Infinity);
    const right = counted.filter(index => logits[index].every(logit => logit <= logits[index][labels[index]]));
    const {settings, temperature, outliers} = fitted;
    return {settings, temperature, outliers, right: right.length, counted: counted.length};
  },

  /** Take the head that a file has. */
  async restore({number, support, fit}) {
    heads.set(number, {fitted: new head.FittedHead(support, fit)});
  },

  /** Pairs of copies. */
  async copies({pictures, features}) {
    return same.samePictures(pictures, features);
  },

  /** Which picture to label next. */
  async next({features, probabilities, known}) {
    return which.mostUseful(features, probabilities, known);
  },

  /** The learning curve of a fitted head. */
  async curve({number}) {
    const {fitted: {settings}, support, logits} = heads.get(number);
    const pause = () => new Promise(resolve => setTimeout(resolve));
    return curve.learningCurve(head, settings, support, logits, {pause});
  },

  /** A fitted head's answer to a picture's features. */
  async decide({number, adapted, unadapted}) {
    const {fitted} = heads.get(number), {probabilities, unknown, label, score, doubt} = fitted.predict(adapted, unadapted);
    const threshold = fitted.outliers?.threshold ?? null;
    return {probabilities: [...probabilities], label: unknown ? probabilities.length : label, score, threshold, doubt};
  },
};

// One message at a time: a session runs one picture after the other. The curve takes long, and pauses for others.
onmessage = ({data: {job, ...message}, ports: [reply]}) => {
  const done = (job === "curve" ? Promise.resolve() : last).then(() => jobs[job](message)).then(
    result => reply.postMessage({result}), error => reply.postMessage({problem: String(error)}));
  if (job !== "curve") last = done;
};
