// Builds src into dist. The result depends only on the sources and package-lock.json.
import { build } from "esbuild";
import { copyFileSync, readFileSync, rmSync, writeFileSync } from "node:fs";

rmSync("dist", { recursive: true, force: true });
const result = await build({
  entryPoints: { app: "src/main.tsx" },
  outdir: "dist",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none",
  metafile: true,
  logLevel: "warning",
});
copyFileSync("src/index.html", "dist/index.html");
copyFileSync("src/icon.svg", "dist/icon.svg");

// The licenses of the libraries in the bundle, which ask to go with it.
const libraries = new Set();
for (const input of Object.keys(result.metafile.inputs)) {
  const found = input.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//);
  if (found) libraries.add(found[1]);
}
const texts = [...libraries].sort().map((name) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  // Some packages have no file; the text of Apache-2.0 is Spillway's own, too.
  let text = `See https://spdx.org/licenses/ for the text.`;
  for (const file of ["LICENSE", "LICENSE.md", "LICENSE.txt"]) {
    try {
      text = readFileSync(`node_modules/${name}/${file}`, "utf8").trim();
      break;
    } catch {
      // It has another name.
    }
  }
  return `${name} ${version} (${license})\n\n${text}\n`;
});
writeFileSync("dist/LICENSES.txt", texts.join("\n" + "-".repeat(72) + "\n\n"));
