package cluster

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
)

// losses are the counters of /proc/net/snmp, netstat and snmp6 that grow when a packet is lost
// (RFC 4113, RFC 4293; net/ipv4/proc.c). Those of snmp6 have a prefix.
var losses = []string{
	"InErrors", "RcvbufErrors", "SndbufErrors", "InCsumErrors", "MemErrors", "InDiscards", "OutDiscards",
	"InHdrErrors", "InAddrErrors", "NoRoutes", "OutNoRoutes", "InNoRoutes", "InTruncatedPkts", "ReasmFails",
	"ListenOverflows", "ListenDrops", "TCPBacklogDrop", "TCPReqQFullDrop", "TCPTimeWaitOverflow",
}

// Losses lists, for a test that misses a packet, the counters that are not zero and say
// where packets were lost: those of each host's kernel and devices, and of each agent's programs.
// They count since the cluster began, and other tests lose packets on purpose.
func (c *Cluster) Losses(ctx context.Context) []string {
	var lines []string
	for _, host := range c.Lab.Hosts() {
		_ = host.Do(func() error {
			for _, found := range slices.Concat(snmpLosses("snmp"), snmpLosses("netstat"), snmp6Losses(), deviceLosses()) {
				lines = append(lines, host.Name+": "+found)
			}
			return nil
		})
	}
	for _, node := range c.Nodes() {
		if c.agents[node] == nil {
			continue
		}
		page, err := c.agents[node].Metrics(ctx)
		if err != nil {
			lines = append(lines, fmt.Sprintf("%s: %v", node, err))
		}
		for line := range strings.Lines(page) {
			if strings.Contains(line, "drop") && !strings.HasPrefix(line, "#") && !strings.HasSuffix(line, " 0\n") {
				lines = append(lines, node+": "+strings.TrimSpace(line))
			}
		}
	}
	return lines
}

// Trail lists what each node's agent and conntrack know of a client's socket, ADDRESS:PORT, the
// latest refusals, and what the kernel has dropped.
func (c *Cluster) Trail(ctx context.Context, client string) []string {
	_, port, _ := strings.Cut(client[strings.LastIndexByte(client, ':'):], ":")
	var lines []string
	for _, node := range c.Nodes() {
		a := c.agents[node]
		if a == nil {
			continue
		}
		for _, args := range [][]string{
			{c.Binary, "flows", "--limit=100000", "-o=wide", "--api-socket=" + a.Socket()},
			{c.Binary, "flows", "--since=1m", "--event=refused,dropped", "-o=wide", "--api-socket=" + a.Socket()},
			{"conntrack", "-L"}, {"conntrack", "-L", "-f", "ipv6"},
		} {
			out, err := a.host.Command(ctx, args...).CombinedOutput()
			if err != nil {
				lines = append(lines, fmt.Sprintf("%s: %v: %v", node, args[1:], err))
			}
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, client) || strings.Contains(line, "port="+port+" ") {
					lines = append(lines, node+": "+strings.TrimSpace(line))
				}
			}
		}
	}
	return append(lines, c.dropsOf(port)...)
}

// ownNet reads a file of the network namespace of this thread; "" if there is none.
func ownNet(name string) string {
	text, _ := os.ReadFile("/proc/thread-self/net/" + name) // the counters are hints
	return string(text)
}

// snmpLosses reads lines in pairs: "Udp: NAME..." and "Udp: VALUE...".
func snmpLosses(file string) (found []string) {
	names := map[string][]string{}
	for line := range strings.Lines(ownNet(file)) {
		fields := strings.Fields(line)
		if names[fields[0]] == nil {
			names[fields[0]] = fields
			continue
		}
		for i, name := range names[fields[0]] {
			if slices.Contains(losses, name) && i < len(fields) && fields[i] != "0" {
				found = append(found, fmt.Sprint(fields[0], " ", name, " ", fields[i]))
			}
		}
	}
	return found
}

// snmp6Losses reads lines such as "Udp6RcvbufErrors 3".
func snmp6Losses() (found []string) {
	for line := range strings.Lines(ownNet("snmp6")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		value = strings.TrimSpace(value)
		if value != "0" && slices.ContainsFunc(losses, func(loss string) bool { return strings.HasSuffix(name, "6"+loss) }) {
			found = append(found, name+" "+value)
		}
	}
	return found
}

// deviceLosses reads /proc/net/dev: after the name come eight counters of what was received,
// and eight of what was sent; the third and fourth of each are errors and drops.
func deviceLosses() (found []string) {
	for line := range strings.Lines(ownNet("dev")) {
		name, values, _ := strings.Cut(line, ":")
		fields := strings.Fields(values)
		if len(fields) < 16 {
			continue // the head
		}
		for i, what := range map[int]string{2: "rx errors", 3: "rx drops", 10: "tx errors", 11: "tx drops"} {
			if fields[i] != "0" {
				found = append(found, fmt.Sprint(strings.TrimSpace(name), " ", what, " ", fields[i]))
			}
		}
	}
	slices.Sort(found)
	return found
}
