package doctor

import (
	"testing"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/node/kernel"
)

func TestReportsFitTheTerminal(t *testing.T) {
	node := &doctor.Node{Kernel: kernel.Version{Major: 6, Minor: 18}}
	clitest.Pages(t, "healthy", doctor.NewReport(node, nil))
	clitest.Pages(t, "sick", doctor.NewReport(node, []doctor.Finding{
		{ID: "conntrack-table-full", Severity: doctor.Critical, Namespace: "cni-5b2c1d7e-0c3f-4a4e-9d8a-1f2e3d4c5b6a",
			Title: "new connections are at risk: the conntrack table is 99.6 % full",
			Evidence: []string{"261095 entries of 262144 (nf_conntrack_max)",
				"dropped packets 12 since this namespace was created, 0 of them in the last 1.0 s"},
			Packets: "A full table drops the first packet of every new connection.", Remedy: "Raise the limit and the buckets.",
			Commands: []string{"sysctl -w net.netfilter.nf_conntrack_max=524288"}, Fixable: true,
			Documentation: "https://spillway.dev/docs/runbooks/conntrack-table-full/"},
		{ID: "tcp-not-liberal", Severity: doctor.Info, Title: "RSTs of middleboxes may end connections", Packets: "x", Remedy: "y"},
	}))
}
