package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestPagesAreReproducibleAndReadable(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir()}
	for _, dir := range dirs {
		if err := write(filepath.Join(dir, "man1"), "1.2.3", "1700000000"); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("diff", "-r", dirs[0], dirs[1]).CombinedOutput(); err != nil {
		t.Errorf("two runs differ: %s", out)
	}
	for name, want := range map[string][]string{
		"spillway.1":                    {"spillway-doctor(1)", "spillway-lab(1)", "Spillway 1.2.3", "2023-11-14", "EXIT STATUS"},
		"spillway-doctor.1":             {"--fail-on", "spillway doctor --netns here --fix", "spillway(1)"},
		"spillway-donottrack-explain.1": {"[OPTIONS]", `.SS "Flow"`, ".TP\ndiffers by address\nthe addresses of a peer"},
		"spillway-lab-lab-run.1":        {"--quick", "snat-race"},
	} {
		text, err := os.ReadFile(filepath.Join(dirs[0], "man1", name))
		if err != nil {
			t.Error(err)
			continue
		}
		plain := strings.ReplaceAll(string(text), `\-`, "-")
		plain = strings.NewReplacer(`\fB`, "", `\fR`, "", `\fI`, "").Replace(plain)
		for _, w := range want {
			if !strings.Contains(plain, w) {
				t.Errorf("%s lacks %q:\n%.600s", name, w, plain)
			}
		}
	}
	pages, _ := filepath.Glob(dirs[0] + "/man1/*")
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, bad := range []string{"[flags]", "[=", "for help", "help for"} { // of cobra
			if strings.Contains(string(text), bad) {
				t.Errorf("%s has %q", page, bad)
			}
		}
	}
	if pages, _ := filepath.Glob(dirs[0] + "/man1/spillway-chart*"); len(pages) > 0 {
		t.Errorf("hidden commands have pages: %v", pages)
	}
}
