/** parse returns an address as a number and its bits; undefined if it is none. */
function parse(text: string): { value: bigint; bits: number } | undefined {
  if (!text.includes(":")) {
    const parts = text.split(".");
    if (parts.length !== 4 || !parts.every((p) => /^\d{1,3}$/.test(p) && Number(p) < 256)) return undefined;
    return { value: parts.reduce((sum, p) => (sum << 8n) | BigInt(p), 0n), bits: 32 };
  }
  const mapped = text.match(/^(.*:)(\d+\.\d+\.\d+\.\d+)$/);
  if (mapped) {
    const v4 = parse(mapped[2]!);
    if (!v4) return undefined;
    text = `${mapped[1]}${(v4.value >> 16n).toString(16)}:${(v4.value & 0xffffn).toString(16)}`;
  }
  const [head, tail, more] = text.split("::");
  if (more !== undefined) return undefined;
  const first = head ? head.split(":") : [];
  const last = tail ? tail.split(":") : [];
  const missing = 8 - first.length - last.length;
  if (tail === undefined ? missing !== 0 : missing < 1) return undefined;
  const groups = [...first, ...Array<string>(missing).fill("0"), ...last];
  if (!groups.every((g) => /^[0-9a-f]{1,4}$/i.test(g))) return undefined;
  return { value: groups.reduce((sum, g) => (sum << 16n) | BigInt(parseInt(g, 16)), 0n), bits: 128 };
}

/** inPrefix reports whether a prefix such as 10.0.0.0/8 contains an address. */
export function inPrefix(address: string, prefix: string): boolean {
  const [base, length] = prefix.split("/");
  const a = parse(address);
  const b = parse(base ?? "");
  if (!a || !b || a.bits !== b.bits) return false;
  const bits = length === undefined ? a.bits : Number(length);
  if (!Number.isInteger(bits) || bits < 0 || bits > a.bits) return false;
  const shift = BigInt(a.bits - bits);
  return a.value >> shift === b.value >> shift;
}

/** isAddressOrPrefix reports whether text can be a filter for addresses. */
export function isAddressOrPrefix(text: string): boolean {
  const address = text.split("/")[0] ?? "";
  return parse(address) !== undefined && inPrefix(address, text);
}
