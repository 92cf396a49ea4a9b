// Runs test/*.test.ts with node's own runner.
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";

const dir = mkdtempSync("node_modules/.test-");
let status = 1;
try {
  const files = readdirSync("test").filter((name) => name.endsWith(".test.ts"));
  await build({
    entryPoints: files.map((name) => `test/${name}`),
    outdir: dir,
    outExtension: { ".js": ".mjs" },
    bundle: true,
    format: "esm",
    platform: "node",
    target: "node18",
    jsx: "automatic",
    jsxImportSource: "preact",
    logLevel: "warning",
  });
  const bundles = readdirSync(dir).map((name) => `${dir}/${name}`);
  status = spawnSync(process.execPath, ["--test", ...bundles], { stdio: "inherit" }).status ?? 1;
} finally {
  rmSync(dir, { recursive: true, force: true });
}
process.exit(status);
