// Package programs builds the programs of a cluster that are not Debian's. hack/peers
// lists them, hack/programs has their versions.
package programs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Build builds programs that are not built yet, and returns the directory that holds
// them. It writes a line about each build to out.
func Build(ctx context.Context, out io.Writer, names ...string) (dir string, err error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, "hack", "peers"), names...)
	cmd.Stderr = out
	text, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build %s: %w", strings.Join(names, ", "), err)
	}
	return strings.TrimSpace(string(text)), nil
}

// Version returns the version of Kubernetes that Build builds, such as "v1.36.3".
func Version() (string, error) {
	return moduleVersion("kubernetes", "k8s.io/kubernetes")
}

// Source returns the directory of a module's source, of the version that Build builds. It
// downloads what is not there. program is a directory of hack/programs.
func Source(ctx context.Context, program, module string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir = filepath.Join(root, "hack", "programs", program)
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	text, err := cmd.Output()
	var download struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(text, &download); jsonErr == nil && download.Error != "" {
		err = errors.New(download.Error)
	}
	if err != nil {
		return "", fmt.Errorf("download source of %s: %w", module, err)
	}
	return download.Dir, nil
}

func moduleVersion(program, module string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(root, "hack", "programs", program, "go.mod"))
	if err != nil {
		return "", err
	}
	_, rest, ok := strings.Cut(string(text), module+" v")
	if !ok {
		return "", fmt.Errorf("find version of %s: hack/programs/%s/go.mod does not require it", module, program)
	}
	return "v" + strings.Fields(rest)[0], nil
}

// Root returns the repository that the working directory belongs to.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "hack", "peers")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("find hack/peers: the working directory is not in Spillway's repository")
}
