import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { create } from "@bufbuild/protobuf";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import { inPrefix, isAddressOrPrefix } from "../src/address";
import { decide, traceCommand } from "../src/decision";
import type { Service } from "../src/gen/spillway/node/v1alpha1/node_pb";
import { EventKind, FlowEventSchema, FlowSchema, Protocol, ServiceSchema } from "../src/gen/spillway/node/v1alpha1/node_pb";
import { noQuery, toFilter } from "../src/query";
import { reasonOf, refuses, runbookOf, runbooks } from "../src/reasons";
import { bytes, duration, hostPort, milliseconds, per, short, shown, stateText } from "../src/text";

test("text from elsewhere cannot drive a terminal or turn its direction", () => {
  assert.equal(shown("\x1b[31mred\u202egnp.exe\u0000\n"), "\\u001b[31mred\\u202egnp.exe\\u0000\\u000a");
  assert.equal(shown("shop/wéb ✓"), "shop/wéb ✓");
  assert.ok(shown("x".repeat(100_000)).length < 500);
});

test("numbers for people", () => {
  assert.deepEqual([0, 0.05, 0.42, 7, 41.6, 950, 12_300, 4.5e6].map(short), ["0", "0.05", "0.4", "7", "41.6", "950", "12.3 k", "4.5 M"]);
  assert.deepEqual([0, 0.09, 0.42, 0.9999, 7, 990, 1500, 90_000, 600_000, 9e7].map(duration), ["0 ms", "90 µs", "420 µs", "1 ms", "7 ms", "990 ms", "1.5 s", "90 s", "10 min", "25 h"]);
  assert.deepEqual([1, 0.4, 2].map((n) => per(n, "packet")), ["1 packet/s", "0.4 packets/s", "2 packets/s"]);
  assert.equal(bytes(737_000n), "737 kB");
  assert.equal(milliseconds(create(DurationSchema, { seconds: 1n, nanos: 90_000 })), 1000.09);
  assert.equal(hostPort("fd00::1", 80), "[fd00::1]:80");
});

test("the state of a flow says whether replies take another way", () => {
  const of = (f: { closedByRst?: boolean; dsr?: boolean; oneWay?: boolean }) => stateText(create(FlowSchema, { state: "new", ...f }));
  assert.deepEqual([of({}), of({ closedByRst: true }), of({ dsr: true }), of({ dsr: true, oneWay: true })], ["new", "new (RST)", "new (DSR)", "new (DSR, one way)"]);
});

test("addresses and prefixes", () => {
  for (const [address, prefix, want] of [
    ["10.1.2.3", "10.0.0.0/8", true],
    ["11.1.2.3", "10.0.0.0/8", false],
    ["10.1.2.3", "0.0.0.0/0", true],
    ["10.1.2.3", "::/0", false],
    ["fd00:1::7", "fd00:1::/32", true],
    ["fd00:2::7", "fd00:1::/32", false],
    ["10.1.2.3", "10.1.2.3", true],
    ["10.1.2.3", "10.0.0.0/33", false],
    ["10.1.2", "10.0.0.0/8", false],
    ["::ffff:10.1.2.3", "::ffff:10.0.0.0/104", true],
  ] as const) assert.equal(inPrefix(address, prefix), want, `${address} ${prefix}`);
  for (const bad of ["", "10", "10.0.0.0/99", "10.0.0.256", "1:2", "fd00:::1", "::1::"]) assert.ok(!isAddressOrPrefix(bad), bad);
  for (const good of ["10.0.0.0/8", "fd00::", "::1/128"]) assert.ok(isAddressOrPrefix(good), good);
});

test("filters", () => {
  assert.deepEqual(toFilter({ ...noQuery, service: "shop/web", port: "443", pod: "shop/web-0", address: "10.0.0.0/8" }), {
    filter: { kinds: [], namespace: "shop", service: "web", pod: "shop/web-0", address: "10.0.0.0/8", port: 443 },
    problem: "",
  });
  assert.equal(toFilter({ ...noQuery, service: "shop/" }).filter.service, "");
  for (const bad of [{ service: "web" }, { pod: "web-0" }, { address: "no" }, { port: "70000" }, { port: "x" }]) {
    assert.notEqual(toFilter({ ...noQuery, ...bad }).problem, "", JSON.stringify(bad));
  }
});

test("each runbook exists", () => {
  const files = readdirSync("../docs/runbooks");
  for (const name of runbooks()) assert.ok(files.includes(`${name}.md`), name);
  assert.equal(runbookOf({ id: "x", documentation: "https://spillway.dev/docs/runbooks/insert-failed/" }), "insert-failed");
  assert.equal(runbookOf({ id: "x", documentation: "docs/runbooks/insert-failed.md#fix" }), "insert-failed");
  assert.equal(runbookOf({ id: "insert-failed", documentation: "" }), "insert-failed");
  assert.equal(reasonOf("unheard_of", "something new").words, "Something new.");
  assert.equal(reasonOf("unheard_of").runbook, undefined);
});

const service = create(ServiceSchema, {
  namespace: "shop",
  name: "web",
  ports: [
    {
      port: 80,
      protocol: Protocol.TCP,
      dataplane: "ebpf",
      internalTrafficPolicy: "Cluster",
      externalTrafficPolicy: "Local",
      frontends: [
        { kind: "clusterIP", address: "10.96.0.9", port: 80 },
        { kind: "loadBalancerIP", address: "192.0.2.9", port: 80, sourceRanges: ["203.0.113.0/24"] },
        { kind: "nodePort", address: "", port: 30080 },
      ],
      endpoints: [
        { address: "10.1.0.1", port: 8080, ready: true, serving: true, inUse: true },
        { address: "10.1.0.2", port: 8080, terminating: true },
      ],
    },
  ],
});

function steps(init: { kind?: EventKind; client?: string; to?: string; port?: number; endpoint?: string; reason?: string; packets?: bigint; oneWay?: boolean }, of: Service | null = service) {
  const event = create(FlowEventSchema, {
    kind: init.kind ?? EventKind.OPENED,
    reason: init.reason ?? "",
    flow: {
      node: "a",
      protocol: Protocol.TCP,
      namespace: "shop",
      service: "web",
      client: { address: init.client ?? "10.1.0.7", port: 4000 },
      serviceAddress: { address: init.to ?? "10.96.0.9", port: init.port ?? 80 },
      endpoint: init.endpoint ? { address: init.endpoint, port: 8080 } : undefined,
      packetsToEndpoint: init.packets ?? 0n,
      dsr: init.oneWay ?? false,
      oneWay: init.oneWay ?? false,
    },
  });
  return decide(event, of ?? undefined).map((s) => `${s.mood} ${s.title}: ${s.text}`).join("\n");
}

test("a command has no text from elsewhere but addresses", () => {
  const flow = (address: string, to = "10.96.0.9", protocol = Protocol.TCP) => traceCommand(create(FlowSchema, { protocol, client: { address }, serviceAddress: { address: to, port: 53 } }));
  assert.equal(flow("10.1.0.7"), "spillway trace --from 10.1.0.7 --to 10.96.0.9:53");
  assert.equal(flow("fd00::7", "fd00::9", Protocol.UDP), "spillway trace --from fd00::7 --to [fd00::9]:53 --protocol udp");
  for (const bad of ["", "10.1.0.7; reboot", "$(reboot)", "10.1.0.7/8", "10.1.0.7\n"]) assert.equal(flow(bad) + flow("10.1.0.7", bad), "");
});

test("decisions in words", () => {
  let text = steps({ endpoint: "10.1.0.1" });
  assert.match(text, /good It is an address.*The cluster IP of Service shop\/web, port 80\/TCP/);
  assert.match(text, /1 endpoint of 2 gets new connections on this node. 1 other is not ready/);
  assert.match(text, /One endpoint was chosen: 10.1.0.1:8080, at random/);
  assert.match(steps({ endpoint: "10.1.0.1", oneWay: true }), /answers the client itself: no reply passes node a/);
  text = steps({ kind: EventKind.REFUSED, to: "192.0.2.9", client: "198.51.100.7", reason: "source_range" });
  assert.match(text, /bad Source ranges.*198.51.100.7 is in none of 203.0.113.0\/24/);
  assert.match(text, /No endpoint was chosen/);
  assert.match(text, /warn It was refused: The client is outside/);
  assert.doesNotMatch(text, /endpoints? of 2/);
  assert.match(steps({ to: "192.0.2.9", client: "203.0.113.80", endpoint: "10.1.0.1" }), /is in 203.0.113.0\/24: it may connect[^]*externalTrafficPolicy is Local/);
  assert.match(steps({ to: "192.168.7.1", port: 30080, endpoint: "10.1.0.1" }), /The node port of/);
  assert.match(steps({ to: "10.96.0.77", endpoint: "10.1.0.1" }), /does not hold this address now/);
  assert.match(steps({ endpoint: "10.1.0.1" }, null), /it was deleted since, or could not be read/);
  assert.match(steps({ endpoint: "10.1.0.2" }), /warn The endpoint has changed since: The endpoint is terminating/);
  assert.match(steps({ endpoint: "10.1.0.9" }), /does not have this endpoint any more/);
  assert.match(steps({ kind: EventKind.CLOSED, endpoint: "10.1.0.1", reason: "timeout", packets: 4n }), /bad The endpoint did not answer: 4 packets went to 10.1.0.1:8080/);
  assert.match(steps({ kind: EventKind.DROPPED, endpoint: "10.1.0.1", reason: "snat_ports" }), /bad It was dropped: The node has no free port towards the endpoint. \(snat_ports\)/);
});

test("a Service that does not serve a client refuses it, and other reasons drop packets", () => {
  for (const name of ["rejected_rst", "source_range", "drop_policy_local", "SOCKET_REFUSED"]) assert.ok(refuses(name), name);
  for (const name of ["snat_ports", "flow_table", "drop_no_route"]) assert.ok(!refuses(name), name);
});
