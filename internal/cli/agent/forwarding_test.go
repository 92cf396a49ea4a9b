package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf"
)

func TestSecrets(t *testing.T) {
	const old, new = "0123 456 789abcdef", "fedcba9876543210"
	read := func(text string) ([]ebpf.DSRKey, error) {
		file := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return readSecrets(file)
	}
	one, err := read(old)
	if err != nil || len(one) != 1 {
		t.Fatal(one, err)
	}
	two, err := read(new + "\n" + old + "\n")
	if err != nil || len(two) != 2 || two[1] != one[0] || two[0] == two[1] {
		t.Errorf("keys %v and %v, %v", one, two, err)
	}
	for text, want := range map[string]string{
		"": "has 0 lines", "\n": "has 0 lines", "short": "line 1 has 5 characters", old + "\nshort": "line 2 has 5 characters",
		old + "\n" + new + "\n" + old: "has 3 lines",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
	if _, err := readSecrets(filepath.Join(t.TempDir(), "missing")); err == nil {
		t.Error("a file that is missing is read")
	}
}

func TestMaglevSeedFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "seed")
	for _, c := range []struct{ mode, text, seed, want string }{
		{"ebpf", "0123456789abcdef\n", "0123456789abcdef", ""},
		{"ebpf", "short\n", "", "has 5 characters: write at least 16"},
		{"nftables", "0123456789abcdef\n", "", "needs --proxy-mode ebpf"},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		conf := Config{ProxyMode: c.mode, MaglevSeedFile: file}
		err := conf.readMaglevSeed()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || err == nil &&
			conf.EBPF.MaglevSeed != c.seed {
			t.Errorf("%s, %q: seed %q, error %v", c.mode, c.text, conf.EBPF.MaglevSeed, err)
		}
	}
	conf := Config{ProxyMode: "ebpf", MaglevSeedFile: file + ".missing"}
	if err := conf.readMaglevSeed(); err == nil {
		t.Error("a file that is missing is read")
	}
}
