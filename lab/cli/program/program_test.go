package program

import (
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli/clitest"
)

func TestHelpFitsTheTerminal(t *testing.T) { clitest.Help(t, New) }

func TestCommandsHaveManners(t *testing.T) { clitest.Tree(t, New) }

func TestAFullDeviceFailsEveryCommand(t *testing.T) {
	results := "../../../docs/results/lab.json"
	clitest.FullDevice(t, New, "lab list", "lab list -o json", "lab diff "+results+" "+results,
		"lab report "+results+" --directory "+t.TempDir())
}

func TestShellsCompleteValues(t *testing.T) {
	for _, row := range []struct{ line, want string }{
		{"lab run|", "snat-race"},
		{"lab run snat-race|o", "overlay"},
		{"lab serve|", "dns"},
		{"lab up --pod-network|", "vxlan"},
		{"bench sync --modes|", "nftables"},
		{"bench sync --modes|ebpf,kube", "ebpf,kube-proxy-nftables"},
		{"bench notrack --proxy-mode|", "iptables"},
		{"bench flood -o|", "json"},
	} {
		line, typed, _ := strings.Cut(row.line, "|")
		if got := clitest.Completion(t, New, append(strings.Fields(line), typed)...); !slices.Contains(got, row.want) {
			t.Errorf("%s: completes %q, want %q", row.line, got, row.want)
		}
	}
}
