// The parts of node that tests use; its own types are larger than the page.
declare module "node:assert/strict" {
  interface Assert {
    equal(got: unknown, want: unknown, message?: string): void;
    notEqual(got: unknown, want: unknown, message?: string): void;
    deepEqual(got: unknown, want: unknown, message?: string): void;
    match(text: string, pattern: RegExp): void;
    doesNotMatch(text: string, pattern: RegExp): void;
    ok(value: unknown, message?: string): void;
  }
  const assert: Assert;
  export default assert;
}
declare module "node:test" {
  export function test(name: string, run: () => void | Promise<void>): void;
}
declare module "node:fs" {
  export function readdirSync(path: string): string[];
}
