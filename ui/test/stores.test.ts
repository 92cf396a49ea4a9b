import assert from "node:assert/strict";
import { test } from "node:test";
import { create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { DurationSchema, durationFromMs, timestampFromMs } from "@bufbuild/protobuf/wkt";
import { Api, explain } from "../src/api";
import { Watch, most } from "../src/flows";
import { EventKind, FlowEventSchema, FlowSchema, Protocol, ServiceSchema } from "../src/gen/spillway/node/v1alpha1/node_pb";
import { place, strongest } from "../src/graph";
import { Poll } from "../src/poll";
import { Ring } from "../src/ring";
import { ServiceTable, handshakeText, select } from "../src/services";
import { Counts, Handshakes, Traffic, eventSecond, knownOnly, limits, quantile, rateText, reported, failure, unanswered } from "../src/traffic";

// Frames as a browser has them, but by hand.
const frames: (() => void)[] = [];
Object.assign(globalThis, { requestAnimationFrame: (f: () => void) => frames.push(f) });

function event(kind: EventKind, flow: MessageInitShape<typeof FlowSchema> = {}, reason = "") {
  return create(FlowEventSchema, { kind, reason, flow: { protocol: Protocol.TCP, namespace: "shop", service: "web", client: { address: "10.0.0.1", port: 1 }, endpoint: { address: "10.1.0.1", port: 80 }, ...flow } as MessageInitShape<typeof FlowSchema> });
}

test("a ring keeps the latest items", () => {
  const ring = new Ring<number>(3);
  for (let i = 0; i < 8; i++) ring.push(i);
  assert.deepEqual(ring.newestFirst(), [7, 6, 5]);
  assert.deepEqual(ring.newestFirst((n) => n % 2 === 1), [7, 5]);
  assert.deepEqual(ring.newestFirst(() => true, 1), [7]);
  assert.equal(ring.total, 8);
  assert.equal(ring.latest(3), undefined);
  ring.clear();
  assert.deepEqual(ring.newestFirst(), []);
});

test("a watch is bounded, and updates the screen once for many events", async () => {
  const watch = new Watch();
  let updates = 0;
  watch.subscribe(() => updates++);
  const one = event(EventKind.OPENED);
  for (let i = 0; i < 50; i++) watch.take(Array(200).fill(one));
  for (let i = 0; i < 2000; i++) watch.take([event(EventKind.DROPPED)]);
  assert.equal(updates, 0, "nothing is drawn outside of a frame");
  while (frames.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
  assert.equal(frames.length, 1);
  frames.shift()!();
  assert.equal(updates, 1);
  assert.equal(watch.entries.length, most);
  assert.equal(watch.bad.length, 500);
  assert.equal(watch.entries.total, 12_000);
});

test("no call waits for ever, and no value for minutes", async () => {
  const { setTimeout: real } = globalThis;
  const pauses: number[] = [];
  Object.assign(globalThis, {
    location: { hash: "", origin: "http://page" },
    sessionStorage: { getItem: () => "key" },
    fetch: (_: unknown, init: RequestInit) => new Promise((_, reject) => init.signal!.addEventListener("abort", () => reject(init.signal!.reason))),
    setTimeout: (run: () => void, pause: number) => (pauses.push(pause), real(run, 0)),
  });
  const failed = await new Api().node(0).getService({ namespace: "shop", name: "web" }).catch(explain);
  Object.assign(globalThis, { setTimeout: real });
  assert.equal(failed, "The agent accepts calls but does not answer in time.");
  assert.deepEqual(pauses, [10_000]);

  const { now } = Date;
  let clock = 1_000_000;
  Date.now = () => clock;
  const slow = new Poll(async () => (clock += 20_000), 5000);
  const pause = new Promise<number>((resolve) => Object.assign(globalThis, { setTimeout: (run: () => void, pause: number) => (pause > 100 ? resolve(pause) : real(run, pause)) }));
  const end = slow.subscribe(() => {});
  assert.equal(await pause, 30_000);
  Object.assign(globalThis, { setTimeout: real });
  Date.now = now;
  end();
});

test("counts forget old seconds", () => {
  const counts = new Counts(5);
  counts.add(100, 3);
  counts.add(102);
  assert.deepEqual(counts.series(103, 4), [0, 3, 0, 1]);
  assert.deepEqual(counts.series(105, 4), [0, 1, 0, 0]);
  counts.add(1000);
  assert.deepEqual(counts.series(1001, 4), [0, 0, 0, 1]);
  counts.add(10); // too old to count
  assert.deepEqual(counts.series(1001, 4), [0, 0, 0, 1]);
  assert.equal(counts.rate(1001, 4), 0.25);
});

test("quantiles of buckets", () => {
  assert.equal(quantile([], 0.5, 1), undefined);
  assert.equal(quantile([0, 0, 0], 0.5, 1), undefined);
  assert.equal(quantile([10], 0.5, 1), 0.5);
  assert.equal(quantile([0, 0, 10], 0.5, 1), 3);
  assert.equal(quantile([50, 50], 1, 1), 2);
  const h = new Handshakes();
  for (let i = 0; i < 100; i++) h.add(1, 0.7);
  const q = h.quantile(0.5)!;
  assert.ok(q > 0.5 && q < 1, String(q));
});

test("a handshake of 90 µs is no ms, and counters of ms say no less than they know", () => {
  const row = { key: "shop/web", handshakes: [10] };
  const traffic = new Traffic();
  assert.equal(handshakeText(row, traffic, 0.5), "under 1 ms");
  traffic.add(event(EventKind.ANSWERED, { handshake: create(DurationSchema, { nanos: 90_000 }) }), 1);
  assert.equal(handshakeText(row, traffic, 0.5), "92 µs");
  assert.equal(handshakeText({ key: "shop/cart", handshakes: [0, 0, 10] }, traffic, 0.5), "3 ms");
  assert.equal(handshakeText({ key: "shop/cart", handshakes: [] }, traffic, 0.5), undefined);
});

test("traffic is bounded, whatever names events have", () => {
  const traffic = new Traffic();
  for (let i = 0; i < 30_000; i++) {
    traffic.add(event(EventKind.OPENED, { service: `s${i}`, client: { pod: `ns${i}/x` }, endpoint: { address: `10.1.${i >> 8}.${i & 255}`, port: 1 } }), 50);
    traffic.add(event(EventKind.CLOSED, { service: "web", packetsToEndpoint: 3n, endpoint: { address: `10.1.${i >> 8}.${i & 255}`, port: 1 } }), 50);
  }
  assert.equal(traffic.services.size, limits.services);
  assert.ok(traffic.edges.size <= limits.edges, String(traffic.edges.size));
  assert.ok(traffic.failing.size <= limits.failing, String(traffic.failing.size));
  assert.ok(traffic.skipped > 0);
});

test("events of the last minute are no traffic of now", () => {
  const now = 1_000_000_000, ahead = 7_000; // the page's clock is 7 s ahead of the node's
  const opened = (age: number) => Object.assign(event(EventKind.OPENED), { time: timestampFromMs(now - ahead - age) });
  assert.equal(eventSecond(opened(200), now, ahead), 999_999);
  assert.equal(eventSecond(opened(30_000), now, ahead), 999_970);
  assert.equal(eventSecond(opened(-60_000), now, ahead), 1_000_000, "a clock that has jumped");
  assert.equal(eventSecond(event(EventKind.OPENED), now), 1_000_000, "without a time");
  const traffic = new Traffic();
  traffic.add(opened(0), 1_000_000);
  for (let age = 20; age < 60; age++) for (let i = 0; i < 10; i++) traffic.add(opened(age * 1000), 1_000_000 - age);
  assert.equal(traffic.totals.opened.rate(1_000_001, 5), 1 / 5);
  assert.equal(traffic.totals.opened.series(1_000_001, 61).filter((n) => n === 10).length, 40);
  const [edge] = traffic.edges.values();
  assert.ok(edge!.opened.rate(1_000_001) < 1, String(edge!.opened.rate(1_000_001)));
});

test("an endpoint that does not answer is found", () => {
  const dead = event(EventKind.CLOSED, { packetsToEndpoint: 4n }, "timeout");
  assert.ok(unanswered(dead));
  assert.ok(!unanswered(event(EventKind.CLOSED, { packetsToEndpoint: 4n, handshake: durationFromMs(1) }, "timeout")));
  assert.ok(!unanswered(event(EventKind.CLOSED, { packetsToEndpoint: 4n, packetsToClient: 1n }, "FIN")));
  assert.ok(!unanswered(event(EventKind.REFUSED)));
  const traffic = new Traffic();
  traffic.add(dead, 9);
  assert.deepEqual([...traffic.failing.values()].map((s) => `${s.how} ${s.service} ${s.endpoint} ${s.fails(9)}`), ["silent shop/web 10.1.0.1:80 true"]);
});

test("an endpoint that resets half of its connections fails half of them", () => {
  const reset = event(EventKind.CLOSED, { packetsToEndpoint: 1n, packetsToClient: 1n }, "RST");
  assert.equal(failure(reset), "reset");
  assert.equal(failure(event(EventKind.CLOSED, { handshake: durationFromMs(1), packetsToClient: 1n }, "RST")), undefined, "after a handshake");
  assert.equal(failure(event(EventKind.CLOSED, { packetsToEndpoint: 4n }, "RST")), "silent", "by a client that gave up");
  const traffic = new Traffic();
  for (let i = 0; i < 100; i++) {
    traffic.add(event(EventKind.OPENED), 9);
    traffic.add(i % 2 ? reset : event(EventKind.ANSWERED, { handshake: durationFromMs(1) }), 9);
  }
  const service = traffic.services.get("shop/web")!;
  assert.equal(service.bad.rate(10), 5);
  assert.equal(service.failed.reset!.rate(10), 5);
  const [failing] = traffic.failing.values();
  assert.equal(failing!.how, "reset");
  for (let i = 0; i < 10; i++) traffic.add(event(EventKind.ANSWERED), 9);
  assert.ok(!failing!.fails(9), "it accepts most");
});

test("the map has the strongest ways, and those that fail", () => {
  const traffic = new Traffic();
  for (let i = 0; i < 300; i++) traffic.add(event(EventKind.OPENED, { service: `s${i % 30}` }), 9);
  for (let i = 0; i < 50; i++) traffic.add(event(EventKind.OPENED, { service: "busy" }), 9);
  traffic.add(event(EventKind.REFUSED, { service: "closed", endpoint: undefined }, "source_range"), 9);
  const picture = strongest(traffic, 9, 5);
  const names = picture.nodes.filter((n) => n.kind === "service").map((n) => n.name);
  assert.ok(names.includes("shop/busy") && names.includes("shop/closed"), names.join());
  assert.equal(picture.hidden, 27);
  const layout = place(picture, 900);
  assert.equal(layout.places.size, picture.nodes.length);
  const x = (kind: string) => layout.places.get(picture.nodes.find((n) => n.kind === kind)!.id)!.x;
  assert.ok(x("client") < x("service") && x("service") < x("endpoint"));
  // What fails is first, and the picture fits a phone.
  const top = picture.nodes.filter((n) => n.kind === "service").sort((a, b) => layout.places.get(a.id)!.y - layout.places.get(b.id)!.y)[0]!;
  assert.equal(top.name, "shop/closed");
  assert.ok(place(picture, 340).width <= 342 && layout.width <= 902);
  // A name cannot make a node or a link of another.
  const forged = new Traffic();
  forged.add(event(EventKind.OPENED, { service: "a > s shop/b" }), 9);
  place(strongest(forged, 9, 5), 900);
});

test("Services of nodes are summed, searched and sorted", () => {
  const service = (name: string, connections: bigint) =>
    create(ServiceSchema, { namespace: "shop", name, type: "ClusterIP", ports: [{ port: 80, protocol: Protocol.TCP, dataplane: "ebpf", endpointCount: 3, frontends: [{ address: "10.96.0.9", port: 80 }], counters: { connections } }] });
  const table = new ServiceTable();
  table.update([{ node: "a", services: [service("web", 10n), service("cart", 1n)] }, { node: "b", services: [service("web", 5n)] }], 1000);
  assert.deepEqual(table.rows.map((r) => [r.key, r.connections, r.rate]), [["shop/web", 15, undefined], ["shop/cart", 1, undefined]]);
  table.update([{ node: "a", services: [service("web", 25n), service("cart", 0n)] }], 2000);
  // The counters of cart began anew.
  assert.deepEqual(table.rows.map((r) => [r.key, r.rate]), [["shop/web", 10], ["shop/cart", undefined]]);
  const found = create(ServiceSchema, { namespace: "shop", name: "web", findings: [{ id: "endpoint-refuses", severity: "critical" }, { id: "source-range-refuses", severity: "info" }] });
  table.update([{ node: "a", services: [found] }, { node: "b", services: [found, service("cart", 1n)] }], 3000);
  assert.deepEqual(table.rows.map((r) => r.faults.map((f) => f.id)), [["endpoint-refuses"], []]);
  table.update([{ node: "a", services: [service("web", 25n), service("cart", 0n)] }], 4000);
  const names = (search: string, descending = false) => select(table.rows, search, (r) => r.connections, descending).map((r) => r.name);
  assert.deepEqual(names(""), ["cart", "web"]);
  assert.deepEqual(names("", true), ["web", "cart"]);
  assert.deepEqual(names("SHOP web 10.96"), ["web"]);
  assert.deepEqual(names("none"), []);
});

test("a rate that is not known is not 0", () => {
  const on = (since: number) => ({ mode: "on-demand", since: since * 1000 });
  const text = (nodes: { mode: string; since: number }[], second = 200) => rateText(0, reported(nodes, 100, second));
  assert.equal(text([]), "turning on", "no node has answered");
  assert.equal(text([{ mode: "refused", since: 0 }]), "not known");
  assert.equal(text([{ mode: "", since: 0 }]), "not known");
  assert.equal(text([on(0)]), "turning on");
  assert.equal(text([on(196)]), "turning on", "a rate takes seconds");
  assert.equal(text([on(195)]), "0");
  assert.equal(text([{ mode: "all", since: 0 }]), "0");
  assert.equal(text([{ mode: "all", since: 0 }], 104), "turning on", "the page has just been opened");
  assert.equal(text([on(150), on(0)]), "turning on");
  assert.equal(text([on(150), { mode: "refused", since: 0 }]), "≥ 0");
  const times = [148, 149, 150, 151];
  assert.deepEqual(knownOnly(times, [0, 2, 0, 3], reported([on(150)], 100, 200)), [null, 2, 0, 3]);
  assert.deepEqual(knownOnly(times, [0, 0, 0, 0], reported([on(0), { mode: "off", since: 0 }], 100, 200)), [null, null, null, null]);
});
