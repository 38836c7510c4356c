// Fits the head in JavaScript to each task of a file and writes what it finds: node head_results.mjs HEAD CURVE TASKS
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [path, pathOfCurve, tasks] = process.argv.slice(2);
const head = await import(pathToFileURL(path)), {FittedHead, leaveOneOutLogits} = head;
const {learningCurve} = await import(pathToFileURL(pathOfCurve));
const rows = table => table.map(row => Float64Array.from(row));

const results = await Promise.all(JSON.parse(readFileSync(tasks, "utf8")).map(async task => {
  const support = {features: rows(task.features), unadapted: rows(task.unadapted), labels: task.labels,
    groups: task.groups, groupNames: task.names, negatives: rows(task.negatives), unadaptedNegatives: rows(task.unadapted_negatives)};
  const {temperature, reject, priors, twins} = task;
  const fitted = FittedHead.fit(support, {temperature, falseRejectionRate: 0.2, reject, priors, twins});
  const groups = task.groups ?? [...task.labels.keys()];
  const decisions = task.queries.map((query, index) =>
    fitted.predict(Float64Array.from(query), Float64Array.from(task.unadapted_queries[index])));
  const leftOut = leaveOneOutLogits(fitted.settings, support.features, support.labels, groups);
  const permutation = () => task.permutations.shift();
  const curve = await learningCurve(head, fitted.settings, {...support, groups}, leftOut, {permutation});
  const logits = values => Array.from(values, value => value === -Infinity ? "-inf" : value); // JSON has no infinity
  return {
    settings: fitted.settings,
    temperature: fitted.temperature,
    outliers: fitted.outliers,
    logits: decisions.map(one => logits(one.logits)),
    labels: decisions.map(one => one.label),
    probabilities: decisions.map(one => [...one.probabilities]),
    scores: decisions.map(one => one.score),
    unknown: decisions.map(one => one.unknown),
    doubts: decisions.map(one => one.doubt),
    left_out: leftOut.map(logits),
    curve,
  };
}));
process.stdout.write(JSON.stringify(results));
