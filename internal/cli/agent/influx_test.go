package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestASecretIsOneLineOfAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	for text, want := range map[string]string{
		"hunter2": "", " hunter2\r\n": "", "": "is empty", "\n \n": "is empty",
		"hunter2\nmore": "is not one line", "hunter2\x00": "is not one line", strings.Repeat("hunter2", 4<<10): "is not one line",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		secret, err := readSecret("--flag", path)
		switch {
		case want == "" && (err != nil || secret != "hunter2"):
			t.Errorf("%.20q: %q, %v", text, secret, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2")):
			t.Errorf("%.20q: %q, %v, want %s", text, secret, err, want)
		}
	}
	if _, err := readSecret("--flag", path+"x"); err == nil || !strings.HasPrefix(err.Error(), "read --flag: ") {
		t.Errorf("a file that is not there: %v", err)
	}
}
