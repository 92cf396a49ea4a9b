package kubeproxy

import (
	"strings"
	"testing"
)

// FuzzParseSave reads possible output of iptables-save. It must delete only chains of
// kube-proxy, and no chain that another program's rule jumps to.
func FuzzParseSave(f *testing.F) {
	for _, s := range []string{
		"*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-A - [0:0]\n-A PREROUTING -m comment --comment \"kubernetes " +
			"service portals\" -j KUBE-SERVICES\n-A KUBE-SERVICES -j KUBE-SVC-A\n-A FOREIGN -j KUBE-SVC-A\nCOMMIT\n",
		"*nat\n:KUBE-SVC-A\n-A KUBE-SVC-A -j KUBE-SVC-A\n-A -j\n-A\n-A x -g KUBE-SVC-A -j\n",
		"*\n:KUBE-SERVICES\n-A PREROUTING -m comment --comment \"-j\" -j KUBE-SERVICES",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		tables, err := parseSave(text)
		if err != nil {
			t.Skip(err)
		}
		for _, table := range tables {
			held := table.inUse()
			var in strings.Builder
			table.writeRemoval(&in, held)
			for line := range strings.Lines(in.String()) {
				chain, deletes := strings.CutPrefix(strings.TrimRight(line, "\n"), "-X ")
				if _, stays := held[chain]; deletes && (stays || !isOwn(table.table, chain)) {
					t.Errorf("table %q: deletes %q", table.table, chain)
				}
			}
		}
	})
}
