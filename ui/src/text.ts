import { timestampMs } from "@bufbuild/protobuf/wkt";
import type { Duration, Timestamp } from "@bufbuild/protobuf/wkt";
import { EventKind, Protocol } from "./gen/spillway/node/v1alpha1/node_pb";
import type { Flow, Peer, Service, ServicePort } from "./gen/spillway/node/v1alpha1/node_pb";

const longest = 400;

/**
 * shown makes text from elsewhere safe to show and to copy to a terminal: control
 * characters and those that change the direction of text become visible, and the length
 * is bounded. Markup needs no care: the page makes elements of no string.
 */
export function shown(text: string): string {
  const cut = text.length > longest ? text.slice(0, longest) + "…" : text;
  return cut.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu, (c) => "\\u" + (c.codePointAt(0) ?? 0).toString(16).padStart(4, "0"));
}

/** shownLines is shown for text with lines. */
export function shownLines(text: string): string {
  return text.split("\n").map(shown).join("\n");
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(n: number | bigint): string {
  return whole.format(n);
}

/** short is a number with three digits or so: 950, 12.3 k, 4.5 M. */
export function short(n: number): string {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]] as const) {
    if (n >= size) return digits(n / size) + unit;
  }
  return digits(n);
}

function digits(n: number): string {
  if (n === 0) return "0";
  if (n >= 99.95) return n.toFixed(0);
  return n >= 9.995 ? n.toFixed(1).replace(/\.0$/, "") : n.toFixed(n < 0.095 ? 2 : 1).replace(/\.0$/, "");
}

export function bytes(n: number | bigint): string {
  const b = Number(n);
  return b < 1000 ? `${b} B` : `${short(b)}B`;
}

/** duration is a time span for people, such as 420 µs, 3 s or 2 h. */
export function duration(ms: number): string {
  if (ms === 0) return "0 ms";
  if (ms < 0.9995) return `${Math.max(Math.round(ms * 1000), 1)} µs`;
  if (ms < 1000) return `${digits(ms)} ms`;
  const s = ms / 1000;
  if (s < 120) return `${digits(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} days`;
}

/** milliseconds is a Duration with its fraction, which durationMs of the library rounds away. */
export function milliseconds(d: Duration): number {
  return Number(d.seconds) * 1000 + d.nanos / 1e6;
}

export function span(d: Duration | undefined): string {
  return d ? duration(milliseconds(d)) : "–";
}

/** countsBytes reports that the numbers of a flow are counted, not just 0. */
export function countsBytes(f: Flow): boolean {
  return f.packetsToEndpoint + f.packetsToClient + f.bytesToEndpoint + f.bytesToClient > 0n;
}

export function ms(t: Timestamp | undefined): number {
  return t ? timestampMs(t) : 0;
}

export function clock(t: Timestamp | undefined): string {
  if (!t) return "–";
  const d = new Date(timestampMs(t));
  const two = (n: number) => String(n).padStart(2, "0");
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}.${String(d.getMilliseconds()).padStart(3, "0")}`;
}

export function hostPort(address: string, port: number): string {
  if (!address) return port ? `:${port}` : "";
  return address.includes(":") ? `[${address}]:${port}` : `${address}:${port}`;
}

export function peer(p: Peer | undefined): string {
  return p ? hostPort(p.address, p.port) : "–";
}

export function protocol(p: Protocol): string {
  return { [Protocol.TCP]: "TCP", [Protocol.UDP]: "UDP", [Protocol.SCTP]: "SCTP", [Protocol.ICMP]: "ICMP", [Protocol.UNSPECIFIED]: "" }[p] ?? "";
}

export const kinds: { kind: EventKind; name: string; mood: string }[] = [
  { kind: EventKind.OPENED, name: "opened", mood: "calm" },
  { kind: EventKind.ANSWERED, name: "answered", mood: "good" },
  { kind: EventKind.CLOSED, name: "closed", mood: "soft" },
  { kind: EventKind.REFUSED, name: "refused", mood: "warn" },
  { kind: EventKind.DROPPED, name: "dropped", mood: "bad" },
];

export function serviceKey(s: { namespace: string; name: string }): string {
  return `${s.namespace}/${s.name}`;
}

/** flowService is the key of a flow's Service. */
export function flowService(f: Flow): string {
  return `${f.namespace}/${f.service}`;
}

/** portNames is such as 80/TCP http, 443/TCP. Ports of two families are one. */
export function portNames(s: Service): string {
  return [...new Set(s.ports.map(portName))].join(", ");
}

export function portName(p: ServicePort): string {
  return `${p.port}/${protocol(p.protocol)}` + (p.name ? ` ${p.name}` : "");
}

export function plural(n: number, one: string, many = one + "s"): string {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** per is a rate with its unit, such as 1 packet/s. */
export function per(rate: number, one: string): string {
  return `${short(rate)} ${short(rate) === "1" ? one : one + "s"}/s`;
}

/** The state of a flow, how it was closed, and whether replies take another way. */
export function stateText(flow: Flow) {
  const more = [flow.closedByRst && "RST", flow.dsr && "DSR", flow.oneWay && "one way"].filter(Boolean);
  return more.length ? `${flow.state} (${more.join(", ")})` : flow.state;
}
