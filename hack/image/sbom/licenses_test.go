package sbom

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestDebianLicenses(t *testing.T) {
	for copyright, want := range map[string][]string{
		"Format: x\n\nFiles: *\nLicense: GPL-2+\n the text\n\nFiles: a\nLicense: Expat and GPL-2+ or custom\n": {"GPL-2.0-or-later", "MIT",
			"custom"},
		"Format: x\nLicense:\n none is named\n":                                            nil,
		"See /usr/share/common-licenses/LGPL-2.1, or\n/usr/share/common-licenses/GPL-2.\n": {"GPL-2", "LGPL-2.1"},
		"": nil,
	} {
		if got := debianLicenses(copyright); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", copyright, got, want)
		}
	}
	list := *licenses([]string{"GPL-2.0-or-later", "custom"})
	if list[0].License.ID != "GPL-2.0-or-later" || list[1].License.ID != "" || list[1].License.Name != "custom" {
		t.Errorf("%+v, %+v", list[0].License, list[1].License)
	}
}

func TestLicensesOfFiles(t *testing.T) {
	own, err := os.ReadFile("../../../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"License.md": string(own),
		"LICENSE-OTHER": strings.Repeat("ask the author ", 5000) + string(own), "README": string(own)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := licensesOf(dir); err != nil || !slices.Equal(got, []string{"Apache-2.0"}) {
		t.Errorf("%q, %v", got, err)
	}
	if err := os.Remove(filepath.Join(dir, "License.md")); err != nil {
		t.Fatal(err)
	}
	if got, err := licensesOf(dir); err != nil || len(got) > 0 {
		t.Errorf("without a license: %q, %v", got, err)
	}
}
