// Finds the pairs of the same picture in each set of a file and writes them: node same_results.mjs SAME_PICTURE SETS
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const [same, sets] = process.argv.slice(2), {samePictures} = await import(pathToFileURL(same));
const found = JSON.parse(readFileSync(sets, "utf8")).map(({pictures, features}) =>
  samePictures(pictures.map(one => Uint8Array.from(one)), features.map(one => Float64Array.from(one))));
process.stdout.write(JSON.stringify(found));
