package plan

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/page"
)

func TestPlanSaysThePublishedCeiling(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run([]string{"plan", "--load", "tcp=4000", "--table", "524288", "-o", "json"}, &out, &errs); code != cli.ExitDone {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	var p planReport
	if err := json.Unmarshal(out.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	if p.Entries != 480000 || p.Table != 640000 || int(p.Ceilings[0]) != 4369 {
		t.Errorf("%+v", p)
	}
	out.Reset()
	if code := run([]string{"plan", "--table", "131072", "--timeout", "tcp_time_wait=2m"}, &out, &errs); code != cli.ExitDone ||
		!strings.Contains(out.String(), " 1092\n") {
		t.Errorf("exit code %d: %s%s", code, &out, &errs)
	}
}

func TestPlanRefusesWhatItCannotRead(t *testing.T) {
	for _, args := range [][]string{{}, {"--load", "tcp"}, {"--load", "pigeon=3"}, {"--load", "tcp=1,soon"}, {"--load", "tcp=-1"},
		{"--load", "tcp=1", "--timeout", "udp"}, {"--load", "tcp=1", "--timeout", "udp=-1s"}, {"--load", "tcp=1", "--timeout", "pigeon=3s"},
		{"--load", "tcp=1", "--headroom", "1"},
		{"--load", "tcp=1", "--headroom", "nan"}, {"--load", "tcp=1", "--headroom", "inf"}, {"--load", "tftp=1", "--lost", "nan"},
		{"--load", "tcp=nan"}, {"--load", "tcp=inf"}, {"--load", "tcp=1", "-o", "xml"}, {"--load", "tcp=1", "--netns", "here"}} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"plan"}, args...), &out, &errs); code != cli.ExitUsage || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%v: exit code %d: %q", args, code, errs.String())
		}
	}
}

// An error names the flag, and the values that it may have.
func TestPlanNamesTheFlag(t *testing.T) {
	for args, want := range map[string]string{
		"--table 0":                        "--table 0: must be 1 or more",
		"--load tcp=1 --table -1":          "--table -1: must be 1 or more",
		"--load tcp=1 --wait -1s":          "--wait -1s: must not be negative",
		"--load tcp=1 --headroom 1":        "--headroom 1: must be from 0 to less than 1",
		"--load tftp=1 --lost 2":           "--lost 2: must be from 0 to 1",
		"--live --sample 0s":               "--sample 0s: must be longer",
		"--load tcp=0":                     `--load "tcp=0": rate 0: must be more than 0`,
		"--load pigeon=3":                  "use one of udp, udp-unanswered, tcp,",
		"--load tcp=1 --timeout udq=3s":    `"udq" is not a name of a timeout (did you mean udp?): use one of icmp, tcp_close, tcp_established, tcp_syn_sent, tcp_time_wait, udp, udp_stream`,
		"--load tcp=1 --timeout udp=-1s":   `--timeout "udp=-1s": "-1s" is not a duration, or is negative`,
		"--load tcp=1 --timeout udp":       "write one like udp=10s",
		"--load tcp=1 --live --timeout =1": `"" is not a name of a timeout`,
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"plan"}, strings.Fields(args)...), &out, &errs); code != cli.ExitUsage || out.Len() > 0 ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%s: exit code %d, want %q: %s%s", args, code, want, &out, &errs)
		}
	}
}

// The output contains no undefined number, and none that overflowed.
func TestPlanRefusesWhatHasNoNumber(t *testing.T) {
	for _, args := range [][]string{
		{"--load", "tcp=1000000", "--headroom", "0.999999999999999"},
		{"--load", "tftp=1e300", "--timeout", "udp=0s"},
		{"--load", "udp=1", "--timeout", "udp=0s", "--table", "1000"},
	} {
		for _, format := range []string{"table", "json"} {
			var out, errs bytes.Buffer
			code := run(append([]string{"plan", "-o", format}, args...), &out, &errs)
			if code != cli.ExitFailed || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 ||
				!strings.HasPrefix(errs.String(), "spillway: plan: ") {
				t.Errorf("%v: exit code %d: %s%s", args, code, &out, &errs)
			}
		}
	}
}

func TestPlanSaysThatExpectationsDoNotFit(t *testing.T) {
	for lost, want := range map[string]bool{"1": false, "0": true} {
		args := []string{"plan", "--lost", lost, "--load", "tftp=10"}
		var out, errs bytes.Buffer
		run(args, &out, &errs)
		said := strings.Contains(out.String(), "TOO FEW EXPECTATIONS: they do not fit; to set the limit:\n  sysctl -w "+
			"net.netfilter.nf_conntrack_expect_max=3000\n")
		if said == want {
			t.Errorf("lost %s: said %v: %s%s", lost, said, &out, &errs)
		}
		out.Reset()
		run(append(args, "-o", "json"), &out, &errs)
		var got struct {
			Fit *bool `json:"expectFit"`
		}
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got.Fit == nil || *got.Fit != want {
			t.Errorf("lost %s: %v: %s%s", lost, err, &out, &errs)
		}
	}
}

// A load of 776,136 entries does not fit into a table of 524,288.
func TestPlanSaysWhatATableLacks(t *testing.T) {
	for name, table := range map[string]string{"small": "524288", "tight": "800000", "large": "2000000"} {
		for _, width := range clitest.Widths {
			t.Setenv("COLUMNS", fmt.Sprint(width))
			var out, errs bytes.Buffer
			args := []string{"plan", "--load", "tcp=5000", "--load", "tftp=2198.75,20ms", "--load", "udp=1475.36", "--table", table}
			if code := run(args, &out, &errs); code != cli.ExitDone {
				t.Fatalf("exit code %d: %s", code, &errs)
			}
			clitest.Golden(t, name, width, out.String())
		}
	}
}

func TestPlanJudgesTheLiveTable(t *testing.T) {
	for name, live := range map[string]*liveReport{
		"live-ok":     {Namespace: "here", Entries: 1200, Limit: 262144, PerSecond: 12.5, FullIn: "5h47m36s"},
		"live-close":  {Namespace: "here", Entries: 220000, Limit: 262144, PerSecond: -3},
		"live-nearly": {Namespace: "cni-3f1c", Entries: 261095, Limit: 262144}, // 99.6 %, and not growing
		"live-full":   {Namespace: "cni-3f1c", Entries: 262144, Limit: 262144, FullIn: "0s"},
	} {
		var out bytes.Buffer
		for _, width := range clitest.Widths {
			out.Reset()
			p := planReport{Live: live}
			if err := cli.Table.Print(&page.Page{Writer: &out, Width: width}, &p); err != nil {
				t.Fatal(err)
			}
			clitest.Golden(t, name, width, out.String())
		}
	}
}
