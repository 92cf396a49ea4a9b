package agent

import (
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/decisions/intent"
)

// minSecret is the least length of a line of --dsr-key-file and of --maglev-seed-file, in bytes.
const minSecret = 16

// maxSecrets is the number of lines that count: the present secret and the one before it.
const maxSecrets = 2

// validateForwarding checks --forwarding, and reads --dsr-key-file.
func (c *Config) validateForwarding() (err error) {
	switch {
	case c.Forwarding == intent.SNAT && c.DSRKeyFile == "":
		return nil
	case c.ProxyMode != "ebpf" && c.Forwarding == intent.SNAT:
		return cli.UsageErrorf("--dsr-key-file needs --proxy-mode ebpf: leave it out")
	case c.ProxyMode != "ebpf":
		return cli.UsageErrorf("--forwarding %s needs --proxy-mode ebpf: leave it out", c.Forwarding)
	case c.DSRKeyFile == "":
		return cli.UsageErrorf("--forwarding %s needs --dsr-key-file, with the same secret on all nodes", c.Forwarding)
	case c.MasqueradeAll:
		return cli.UsageErrorf("--masquerade-all and --dsr-key-file: an endpoint gets either the node's address or the client's: give one " +
			"of them")
	}
	c.EBPF.DSRKeys, err = readSecrets(c.DSRKeyFile)
	return err
}

// readMaglevSeed reads --maglev-seed-file. Every process of the node sees the command line, so
// the seed is not there.
func (c *Config) readMaglevSeed() error {
	if c.MaglevSeedFile == "" {
		return nil
	}
	if c.ProxyMode != "ebpf" {
		return cli.UsageErrorf("--maglev-seed-file needs --proxy-mode ebpf: leave it out")
	}
	text, err := os.ReadFile(c.MaglevSeedFile)
	if err != nil {
		return fmt.Errorf("read --maglev-seed-file: %w", err)
	}
	if c.EBPF.MaglevSeed = strings.TrimSpace(string(text)); len(c.EBPF.MaglevSeed) < minSecret {
		return fmt.Errorf("--maglev-seed-file %s: has %d characters: write at least %d", c.MaglevSeedFile, len(c.EBPF.MaglevSeed), minSecret)
	}
	return nil
}

// validateXDP checks --xdp.
func (c *Config) validateXDP() error {
	if !slices.Contains(ebpf.XDPModes, c.EBPF.XDP) {
		return cli.UsageErrorf("--xdp %q: not a way to run the program: use auto or off", c.EBPF.XDP)
	}
	if c.EBPF.XDP != ebpf.XDPOff && c.ProxyMode != "ebpf" {
		return cli.UsageErrorf("--xdp %s needs --proxy-mode ebpf: leave it out", c.EBPF.XDP)
	}
	return nil
}

// readSecrets makes keys of the lines of a file.
func readSecrets(file string) ([]ebpf.DSRKey, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read --dsr-key-file: %w", err)
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 || len(lines) > maxSecrets {
		return nil, fmt.Errorf("--dsr-key-file %s: has %d lines: write one secret, or two while the nodes change to a new one", file, len(lines))
	}
	var keys []ebpf.DSRKey
	for i, line := range lines {
		if len(line) < minSecret {
			return nil, fmt.Errorf("--dsr-key-file %s: line %d has %d characters: write at least %d", file, i+1, len(line), minSecret)
		}
		sum := sha256.Sum256([]byte(line))
		keys = append(keys, ebpf.DSRKey(sum[:len(ebpf.DSRKey{})]))
	}
	return keys, nil
}
