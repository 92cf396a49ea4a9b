package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheReferenceIsCurrent(t *testing.T) {
	if err := run(root, true); err != nil {
		t.Error(err)
	}
}

// TestADocumentOutOfDateIsNamed changes a copy of one document.
func TestADocumentOutOfDateIsNamed(t *testing.T) {
	old := documents
	defer func() { documents = old }()
	documents = []document{{"page.md", func(string) ([]byte, error) { return []byte("new\n"), nil }}}
	dir := t.TempDir()
	path := filepath.Join(dir, "page.md")
	if err := os.WriteFile(path, []byte("old\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(dir, true); err == nil || !strings.Contains(err.Error(), "out of date: page.md: run make reference") {
		t.Errorf("got %v", err)
	}
	if err := run(dir, false); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(path); !bytes.Equal(got, []byte("new\n")) {
		t.Errorf("wrote %q", got)
	}
	if err := run(dir, true); err != nil {
		t.Error(err)
	}
}
