package iptables

import (
	"bytes"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// FuzzReadDump reads possible output of iptables-save, with rules of any program.
// readDump must count every rule once, and delete only whole rules that jump to a chain
// of the agent.
func FuzzReadDump(f *testing.F) {
	for _, s := range []string{
		"*nat\n:PREROUTING ACCEPT [0:0]\n:SPW-SERVICES - [0:0]\n-A PREROUTING -m comment --comment \"spillway\" -j SPW-SERVICES\n-A " +
			"SPW-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"default/web:http 80/TCP clusterIP\" -j SPW-SVC-A\nCOMMIT\n",
		"*filter\n:KUBE-KUBELET-CANARY - [0:0]\n-A INPUT -m comment --comment \"-j SPW-X\"\nCOMMIT\n*raw\n",
		"*nat\n:SPW-A\n-A SPW-A\n-A \n:\n*\nCOMMIT\nCOMMIT\n-A SPW-A -j X",
		"*nat\n-A PREROUTING -m comment --comment \"" + strings.Repeat("x", 70000) + "\" -j ACCEPT\nCOMMIT\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, out []byte) {
		own := 0
		dumps, err := readDump(bytes.NewReader(out), func(chain, rule string) {
			own++
			if !strings.HasPrefix(chain, chainPrefix) {
				t.Errorf("rule of chain %q", chain)
			}
			parseComment(rule, model.IPv4)
		})
		if err != nil {
			t.Fatal(err)
		}
		others := 0
		for _, d := range dumps {
			others += d.others + len(d.jumps)
			for name := range d.chains {
				if !d.has(name) || !strings.HasPrefix(name, chainPrefix) {
					t.Errorf("chain %q", name)
				}
			}
			for _, line := range d.editJumps(nil) {
				if strings.ContainsAny(line, "\n") || !strings.HasPrefix(line, "-D ") || strings.HasSuffix(line, `"`) {
					t.Errorf("edit %q", line)
				}
			}
		}
		if lines := bytes.Count(append([]byte("\n"), out...), []byte("\n-A ")); own+others > lines {
			t.Errorf("%d rules of %d lines", own+others, lines)
		}
	})
}
