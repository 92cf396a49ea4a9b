package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"text/template"
)

// krewArchive is the archive of one architecture.
type krewArchive struct{ Arch, Name, SHA256 string }

// writeKrew writes the manifest with which krew installs the archives as a kubectl plugin.
func (r release) writeKrew() error {
	path := filepath.Join(r.root, "deploy", "krew", "spillway.yaml.tmpl")
	t, err := template.New(filepath.Base(path)).Option("missingkey=error").ParseFiles(path)
	if err != nil {
		return fmt.Errorf("read the krew manifest: %w", err)
	}
	var archives []krewArchive
	for _, arch := range architectures {
		name := r.name("linux", arch)
		data, err := os.ReadFile(filepath.Join(r.dist, name+".tar.gz"))
		if err != nil {
			return fmt.Errorf("sum an archive for krew: %w", err)
		}
		archives = append(archives, krewArchive{arch, name, fmt.Sprintf("%x", sha256.Sum256(data))})
	}
	var out bytes.Buffer
	if err := t.Execute(&out, map[string]any{"Version": r.version, "Downloads": r.downloads, "Archives": archives}); err != nil {
		return fmt.Errorf("write the krew manifest: %w", err)
	}
	return r.writeFile(r.name("krew")+".yaml", out.Bytes())
}
