package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// writeNotes writes the section of CHANGELOG.md about this version, and the commits since
// the version before it.
func (r release) writeNotes() error {
	text, err := os.ReadFile(filepath.Join(r.root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	section, err := sectionOf(string(text), r.version)
	if err != nil {
		return err
	}
	commits, err := r.commits()
	if err != nil {
		return err
	}
	return r.writeFile("NOTES.md", []byte(section+commits))
}

// sectionOf returns the text below the heading of a version.
func sectionOf(changelog, version string) (string, error) {
	_, after, ok := strings.Cut(changelog, "\n## "+version)
	if !ok {
		return "", fmt.Errorf("CHANGELOG.md has no section %q: write it", "## "+version)
	}
	_, after, _ = strings.Cut(after, "\n") // the date
	section, _, _ := strings.Cut(after, "\n## ")
	return strings.TrimSpace(section) + "\n", nil
}

// commits returns the subjects of the commits since the previous tag, without merges. The
// first release has none.
func (r release) commits() (string, error) {
	previous, err := r.git("describe", "--tags", "--abbrev=0", "--match=v*", "--exclude=v"+r.version)
	if err != nil {
		return "", nil // no tag
	}
	list, err := r.git("log", "--no-merges", "--format=- %s (%h)", previous+"..HEAD")
	if err != nil || list == "" {
		return "", err
	}
	return fmt.Sprintf("\n## Commits since %s\n\n%s\n", previous, list), nil
}

func (r release) git(args ...string) (string, error) {
	out, err := exec.Command("git", append([]string{"-C", r.root}, args...)...).Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}
