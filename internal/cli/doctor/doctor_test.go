package doctor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// sickNamespace returns a namespace with a rule that doctor reports.
func sickNamespace(t *testing.T) string {
	t.Helper()
	name := fmt.Sprintf("spw-cmd-doctor-%d", os.Getpid())
	if out, err := exec.Command("bash", "-ec", fmt.Sprintf(
		"ip netns add %s; ip netns exec %[1]s iptables-legacy -t nat -A POSTROUTING -j MASQUERADE", name)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	return name
}

func TestDoctorPrintsFindingsAndEndsWell(t *testing.T) {
	name := sickNamespace(t)
	var out, errs bytes.Buffer
	if code := run([]string{"doctor", "--netns", name, "--sample", "0"}, &out, &errs); code != cli.ExitDone || errs.Len() > 0 {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	// The kernel's log is the machine's: another table may have been full of late.
	summary := regexp.MustCompile(`\n\d+ findings?: .*info`)
	if !strings.Contains(out.String(), "\n  masquerade-not-random in "+name+"\n") || !summary.MatchString(out.String()) {
		t.Errorf("page:\n%s", &out)
	}
	out.Reset()
	if code := run([]string{"doctor", "--netns", name, "--sample", "0", "-o", "json"}, &out, &errs); code != cli.ExitDone {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	var r doctor.Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v: %s", err, &out)
	}
	r.Findings = slices.DeleteFunc(r.Findings, func(f doctor.Finding) bool { return f.Namespace == "" })
	if len(r.Findings) != 1 || r.Findings[0].ID != "masquerade-not-random" || r.Findings[0].Namespace != name || r.Namespaces != 1 {
		t.Errorf("%+v", r)
	}
}

func TestDoctorReportsOnlyTheRequestedFindings(t *testing.T) {
	name := sickNamespace(t)
	for id, want := range map[string]int{"masquerade-not-random": cli.ExitFailed, "helper-missing": cli.ExitDone} {
		var out, errs bytes.Buffer
		if code := run([]string{"doctor", "--netns", name, "--sample", "0", "--finding", id, "--fail-on", "info"}, &out, &errs); code != want {
			t.Errorf("%s: exit code %d: %s%s", id, code, &out, &errs)
		}
		if want == cli.ExitDone && (!strings.HasPrefix(out.String(), "No finding helper-missing") ||
			!strings.Contains(out.String(), "conntrack helpers") || strings.Contains(out.String(), "hash buckets")) {
			t.Errorf("page:\n%s", &out)
		}
	}
}

// A finding of the agent is not examined without one, and that is no good news.
func TestDoctorSaysThatAFindingWasNotExamined(t *testing.T) {
	var out, errs bytes.Buffer
	code := run([]string{"doctor", "--netns", sickNamespace(t), "--sample", "0", "--finding", "dsr-replies-missing"}, &out, &errs)
	if code != cli.ExitFailed || !strings.Contains(out.String(), "NOT EXAMINED\n  examine Services, which needs the agent: ") ||
		!strings.Contains(errs.String(), "--finding dsr-replies-missing: not examined") {
		t.Errorf("exit code %d: %s%s", code, &out, &errs)
	}
}

func TestDoctorFailsOnWhatItIsToldTo(t *testing.T) {
	name := sickNamespace(t)
	for failOn, want := range map[string]int{"critical": cli.ExitDone, "warning": cli.ExitDone, "info": cli.ExitFailed} {
		var out, errs bytes.Buffer
		if code := run([]string{"doctor", "--netns", name, "--sample", "0", "--fail-on", failOn}, &out, &errs); code != want {
			t.Errorf("--fail-on %s: exit code %d: %s", failOn, code, &errs)
		}
		if want == cli.ExitFailed && (out.Len() == 0 || strings.Count(errs.String(), "\n") != 1) {
			t.Errorf("--fail-on %s: %q, page of %d bytes", failOn, &errs, out.Len())
		}
	}
}

func TestDoctorRefusesWhatItCannotRead(t *testing.T) {
	for _, args := range [][]string{{"-o", "xml"}, {"--fail-on", "fever"}, {"--finding", "helper"}, {"--finding", ""}, {"--sample", "-1s"},
		{"--netns", "nowhere"}, {"now"}} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"doctor"}, args...), &out, &errs); code != cli.ExitUsage || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%v: exit code %d: %q", args, code, &errs)
		}
	}
}
