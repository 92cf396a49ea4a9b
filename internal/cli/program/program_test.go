package program

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
)

func TestHelpFitsTheTerminal(t *testing.T) { clitest.Help(t, New) }

func TestCommandsHaveManners(t *testing.T) { clitest.Tree(t, New) }

func TestAFullDeviceFailsEveryCommand(t *testing.T) {
	clitest.FullDevice(t, New, "plan --table 1000", "plan --table 1000 -o yaml",
		"donottrack explain --manifests ../../../examples/demo --from 10.0.0.9 --to 10.0.0.10 --port 80")
}

func TestShellsCompleteValues(t *testing.T) {
	for _, row := range []struct{ line, want string }{
		{"agent --proxy-mode|ebpf", "ebpf"},
		{"agent --detect-local-mode|Br", "BridgeInterface"},
		{"agent --conntrack-autopilot|", "advise"},
		{"doctor --fail-on|", "critical"},
		{"doctor --netns|", "here"},
		{"doctor --finding|", "stale-udp-entries"},
		{"doctor --netns|x,he", "x,here"},
		{"drops --protocol|i", "icmpv6"},
		{"plan --load|tcp", "tcp-reset="},
		{"plan --timeout|tcp_t", "tcp_time_wait="},
		{"donottrack explain --protocol|", "SCTP"},
		{"top -o|", "yaml"},
		{"|doc", "doctor"},
		{"completion|", "zsh"},
		{"help donottrack|", "explain"},
		{"maps|fr", "frontends"},
	} {
		line, typed, _ := strings.Cut(row.line, "|")
		if got := clitest.Completion(t, New, append(strings.Fields(line), typed)...); !slices.Contains(got, row.want) {
			t.Errorf("%s: completes %q, want %q", row.line, got, row.want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		var out, errs bytes.Buffer
		if code := New().Run([]string{"completion", shell}, &out, &errs); code != cli.ExitDone || !strings.Contains(out.String(), "__complete") {
			t.Errorf("%s: exit code %d: %s", shell, code, &errs)
		}
	}
}

func TestTyposGetSuggestions(t *testing.T) {
	for _, row := range []struct{ line, want string }{
		{"docter", `unknown command "docter" (did you mean doctor?): see 'spillway --help'`},
		{"donottrack explian", `unknown command "explian" (did you mean explain?): see 'spillway donottrack --help'`},
		{"doctor --netnss here", "unknown flag: --netnss (did you mean --netns?): see 'spillway doctor --help'"},
		{"help donottrack explian", `unknown command "explian" (did you mean explain?)`},
		{"completion", "no shell given: use one of bash, zsh, fish, powershell"},
		{"completion bahs", `shell "bahs": unknown (did you mean bash?): use one of bash, zsh, fish, powershell`},
		{"completion bogus", `shell "bogus": unknown: use one of bash, zsh, fish, powershell`},
		{"top --zzz", "unknown flag: --zzz: see 'spillway top --help'"},
	} {
		var out, errs bytes.Buffer
		if code := New().Run(strings.Fields(row.line), &out, &errs); code != cli.ExitUsage || errs.String() != "spillway: "+row.want+"\n" {
			t.Errorf("%s: exit code %d, %q", row.line, code, &errs)
		}
	}
}

// The agent would be started again and again, so its log should say in one line what to
// change.
func TestABadAddressRangeIsWrongUsage(t *testing.T) {
	for value, want := range map[string]string{
		"10.244.0.0/33": "not an address range: write one like 10.0.0.0/8 or fd00::/8",
		"fd00::/129":    "not an address range: write one like 10.0.0.0/8 or fd00::/8",
		"10.244.1.5/16": "not how this address range is written: write 10.244.0.0/16",
	} {
		var out, errs bytes.Buffer
		code := New().Run([]string{"agent", "--manifests", "/nonexistent", "--cluster-cidr", "fd44::/48," + value}, &out, &errs)
		if line := fmt.Sprintf("spillway: --cluster-cidr %q: %s\n", value, want); code != cli.ExitUsage ||
			errs.String() != line || out.Len() > 0 {
			t.Errorf("%s: exit code %d, %q, %q", value, code, &errs, &out)
		}
	}
}

// kubectl finds the program by the name of its file, and users type "kubectl spillway".
func TestAPluginCallsItselfAsUsersDo(t *testing.T) {
	p := Called("/home/user/.krew/bin/kubectl-spillway")
	t.Setenv("COLUMNS", "80")
	for _, row := range []struct {
		line, want, lacks string
		code              int
	}{
		{"--help", "  kubectl spillway COMMAND", "\n  spillway ", cli.ExitDone},
		{"--help", "  kubectl spillway status --all-nodes", "completion", cli.ExitDone},
		{"status --help", "  kubectl spillway status --node node2", "\n  spillway ", cli.ExitDone},
		{"help donottrack explain", "  kubectl spillway donottrack explain --from", "\n  spillway ", cli.ExitDone},
		{"stats", "see 'kubectl spillway --help'", "'spillway", cli.ExitUsage},
		{"status --nodes x", "see 'kubectl spillway status --help'", "'spillway", cli.ExitUsage},
		{"--version", "spillway ", "kubectl", cli.ExitDone},
	} {
		var out bytes.Buffer
		code := p.Run(strings.Fields(row.line), &out, &out)
		if code != row.code || !strings.Contains(out.String(), row.want) || strings.Contains(out.String(), row.lacks) {
			t.Errorf("%s: exit code %d, without %q or with %q: %s", row.line, code, row.want, row.lacks, &out)
		}
	}
	if got := clitest.Completion(t, func() cli.Program { return p }, "stat"); !slices.Contains(got, "status") {
		t.Errorf("kubectl completes %q", got)
	}
	if p := Called("/usr/bin/spillway"); p.Plugin != "" {
		t.Errorf("spillway calls itself %q", p.Plugin)
	}
}

func TestVersionFlag(t *testing.T) {
	var flag, command, errs bytes.Buffer
	if New().Run([]string{"--version"}, &flag, &errs) != cli.ExitDone || New().Run([]string{"version"}, &command, &errs) != cli.ExitDone ||
		flag.String() != command.String() || !strings.HasPrefix(flag.String(), "spillway ") {
		t.Errorf("%q, %q, %s", &flag, &command, &errs)
	}
}
