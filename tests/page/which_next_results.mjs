// Finds the picture to label next in each task of a file and writes them: node which_next_results.mjs WHICH_NEXT TASKS
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [path, tasks] = process.argv.slice(2);
const {density, doubt, mostUseful} = await import(pathToFileURL(path));
const rows = table => table.map(row => Float32Array.from(row));
const unit = row => row.map(value => value / (Math.hypot(...row) || 1));

console.log(JSON.stringify(JSON.parse(readFileSync(tasks, "utf8")).map(({features, probabilities, known}) => ({
  density: density(rows(features).map(unit)),
  doubt: probabilities.map(doubt),
  next: mostUseful(rows(features), probabilities, rows(known)),
}))));
