package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/test/testbed/topology"
)

// followDrops has `spillway drops` write down what the kernel drops in the cluster's namespaces,
// so that a lost packet has a place and a reason. Without it tests run as well: a kernel with
// lockdown refuses it.
func (c *Cluster) followDrops() error {
	if !c.FollowDrops {
		return nil
	}
	argv := []string{"drops", "-o=json", "--rate=0"}
	names, err := topology.Namespaces(c.Spec.Name)
	if err != nil {
		return err
	}
	for _, name := range names {
		argv = append(argv, "--netns="+name)
	}
	out, err := os.Create(c.dropsFile())
	if err != nil {
		return fmt.Errorf("follow drops: %w", err)
	}
	defer out.Close()
	c.drops = exec.Command(c.Binary, argv...)
	c.drops.Stdout, c.drops.Stderr = out, out
	if err := c.drops.Start(); err != nil {
		return fmt.Errorf("follow drops: %w", err)
	}
	return nil
}

func (c *Cluster) dropsFile() string { return filepath.Join(c.Dir, "drops.json") }

// endDrops ends what followDrops has started.
func (c *Cluster) endDrops() {
	if c.drops == nil {
		return
	}
	_ = c.drops.Process.Signal(unix.SIGTERM) // it may have ended
	_ = c.drops.Wait()
}

// lossAge is how old a lost packet can be when its test has waited for the answer.
const lossAge = 10 * time.Second

// dropsOf lists the dropped packets that have a port, counts the other late ones by place and
// reason, and has what else was said, such as why drops are not followed.
func (c *Cluster) dropsOf(port string) (lines []string) {
	if !c.FollowDrops {
		return nil
	}
	text, err := os.ReadFile(c.dropsFile())
	if err != nil {
		return []string{err.Error()}
	}
	others := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var d drops.Drop
		switch err := json.Unmarshal([]byte(line), &d); {
		case err != nil || d.Reason == "":
			lines = append(lines, strings.TrimSpace(line))
		case port == strconv.Itoa(int(d.SourcePort)) || port == strconv.Itoa(int(d.DestinationPort)):
			lines = append(lines, strings.TrimSpace(line))
		case time.Since(d.Time) < lossAge:
			others[fmt.Sprintf("%s: %s drops: %s at %s", d.Namespace, d.Protocol, d.Reason, d.Location)]++
		}
	}
	for _, what := range slices.Sorted(maps.Keys(others)) {
		lines = append(lines, fmt.Sprint(what, " ", others[what]))
	}
	return lines
}
