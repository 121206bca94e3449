package storetest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"weir/limit"
)

// Addr is the server's host:port, if it has one.
func (r *Redis) Addr() string { return r.tcp }

// Rights is what README.md says that an ACL user needs; on a cluster also ClusterRights.
const (
	Rights        = "~weir:* -@all +ping +eval +evalsha +time +get +mget +set +del +pexpire +zadd +zrem +zcard +zcount +zrange +zscore +zremrangebyrank +info"
	ClusterRights = "+cluster|slots +asking"
)

// Do sends the server a command on a connection of its own, and returns its reply as
// text: an array's items one a line.
func (r *Redis) Do(args ...string) (string, error) {
	network, address := "tcp", r.tcp
	if address == "" || r.tls {
		network, address = "unix", filepath.Join(r.dir, "s")
	}
	c, err := net.DialTimeout(network, address, time.Second)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(Deadline))
	var b strings.Builder
	if r.password != "" {
		_, _ = fmt.Fprintf(&b, "AUTH %s\r\n", r.password)
	}
	_, _ = fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		_, _ = fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := io.WriteString(c, b.String()); err != nil {
		return "", err
	}
	reply := bufio.NewReader(c)
	if r.password != "" {
		if _, err := readReply(reply); err != nil {
			return "", err
		}
	}
	return readReply(reply)
}

// MustDo is Do of a command that must succeed.
func (r *Redis) MustDo(t testing.TB, args ...string) string {
	t.Helper()
	text, err := r.Do(args...)
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	return text
}

func readReply(r *bufio.Reader) (string, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimRight(line, "\r\n")
	kind, rest := line[0], line[1:]
	switch kind {
	case '-':
		return "", errors.New(rest)
	case '$':
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 {
			return "", err
		}
		text := make([]byte, n+2)
		_, err = io.ReadFull(r, text)
		return string(text[:n]), err
	case '*':
		n, err := strconv.Atoi(rest)
		if err != nil {
			return "", err
		}
		items := make([]string, max(n, 0))
		for i := range items {
			if items[i], err = readReply(r); err != nil {
				return "", err
			}
		}
		return strings.Join(items, "\n"), nil
	}
	return rest, nil
}

// Cluster is a Redis Cluster of a test's own, of masters without replicas. A dead
// one takes only its own slots with it.
type Cluster struct {
	Nodes []*Redis
	URL   string // redis+cluster://
}

const slots = 16384

// StartCluster starts so many masters, with a like share of the slots each.
func StartCluster(t testing.TB, bin string, masters int) *Cluster {
	t.Helper()
	c := startCluster(t, masters, func(flags func() []string) *Redis { return startOnPort(t, bin, flags) })
	c.URL = "redis+" + c.URL
	return c
}

// StartClusterTLS is StartCluster of nodes that speak TLS only, as StartRedisTLS.
func StartClusterTLS(t testing.TB, bin string, masters int, cert Certificate) *Cluster {
	t.Helper()
	c := startCluster(t, masters, func(flags func() []string) *Redis {
		return startTLS(t, bin, func() []string { return append(flags(), cert.flags()...) })
	})
	c.URL = "rediss+" + c.URL
	return c
}

func startCluster(t testing.TB, masters int, start func(flags func() []string) *Redis) *Cluster {
	t.Helper()
	c := &Cluster{}
	var hosts []string
	for i := range masters {
		n := start(func() []string {
			return []string{
				"--cluster-enabled", "yes", "--cluster-port", FreePort(t), "--cluster-node-timeout", "3000",
				"--cluster-require-full-coverage", "no",
			}
		})
		n.MustDo(t, "CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(slots*i/masters), strconv.Itoa(slots*(i+1)/masters-1))
		n.MustDo(t, "CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		c.Nodes = append(c.Nodes, n)
		hosts = append(hosts, n.tcp)
	}
	for _, n := range c.Nodes[1:] {
		host, port, _ := strings.Cut(n.tcp, ":")
		c.Nodes[0].MustDo(t, "CLUSTER", "MEET", host, port, n.flag("--cluster-port"))
	}
	Eventually(t, "all nodes know all slots", func() bool {
		for _, n := range c.Nodes {
			info := n.MustDo(t, "CLUSTER", "INFO")
			if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_slots_assigned:16384") ||
				!strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", masters)) {
				return false
			}
		}
		return true
	})
	c.URL = "cluster://" + strings.Join(hosts, ",")
	return c
}

// Owner is the number of the node that had the slot of a domain's keys at first.
func (c *Cluster) Owner(domain string) int { return limit.ClusterSlot(domain) * len(c.Nodes) / slots }

// Move moves the slot of a domain's keys, with the keys, from one node to another.
func (c *Cluster) Move(t testing.TB, domain string, from, to *Redis) {
	t.Helper()
	slot := strconv.Itoa(limit.ClusterSlot(domain))
	to.MustDo(t, "CLUSTER", "SETSLOT", slot, "IMPORTING", from.ID(t))
	from.MustDo(t, "CLUSTER", "SETSLOT", slot, "MIGRATING", to.ID(t))
	host, port, _ := strings.Cut(to.Addr(), ":")
	for keys := from.MustDo(t, "CLUSTER", "GETKEYSINSLOT", slot, "100"); keys != ""; keys = from.MustDo(t, "CLUSTER", "GETKEYSINSLOT", slot, "100") {
		from.MustDo(t, append([]string{"MIGRATE", host, port, "", "0", "5000", "KEYS"}, strings.Split(keys, "\n")...)...)
	}
	for _, n := range append([]*Redis{to, from}, c.Nodes...) { // the new owner first: it must not be without one
		n.MustDo(t, "CLUSTER", "SETSLOT", slot, "NODE", to.ID(t))
	}
}

// ID is the name of a node in its cluster.
func (r *Redis) ID(t testing.TB) string {
	t.Helper()
	return r.MustDo(t, "CLUSTER", "MYID")
}

func (r *Redis) flag(name string) string {
	for i, f := range r.flags {
		if f == name {
			return r.flags[i+1]
		}
	}
	return ""
}

// Sentinel is a primary and its replica, both with a password or none, and three
// sentinels that watch them.
type Sentinel struct {
	Primary, Replica *Redis
	Sentinels        []*Redis
	URL              string // redis+sentinel://, without a password
}

// SentinelName is what the sentinels call the primary.
const SentinelName = "main"

// StartSentinel starts them; sentinelPassword, if not empty, is what the sentinels
// want.
func StartSentinel(t testing.TB, bin, sentinelPassword string) *Sentinel {
	t.Helper()
	s := &Sentinel{Primary: startOnPort(t, bin, func() []string { return []string{"--repl-diskless-sync-delay", "0"} })}
	host, port, _ := strings.Cut(s.Primary.tcp, ":")
	s.Replica = startOnPort(t, bin, func() []string { return []string{"--replicaof", host + " " + port, "--repl-diskless-sync-delay", "0"} })
	var hosts []string
	for range 3 {
		conf := []string{
			"sentinel monitor " + SentinelName + " " + host + " " + port + " 2",
			"sentinel down-after-milliseconds " + SentinelName + " 1000",
			"sentinel failover-timeout " + SentinelName + " 2000",
		}
		if sentinelPassword != "" {
			conf = append(conf, "requirepass "+sentinelPassword, "sentinel sentinel-pass "+sentinelPassword)
		}
		n := startSentinel(t, bin, conf)
		n.password = sentinelPassword
		// They look every ten seconds, which a test would wait for. (Four times the
		// publish period after a failover has begun the other sentinels undo it, if
		// they have not heard of it; that is why it stays as it is.)
		n.MustDo(t, "SENTINEL", "DEBUG", "INFO-PERIOD", "200", "PING-PERIOD", "200", "ASK-PERIOD", "200")
		s.Sentinels = append(s.Sentinels, n)
		hosts = append(hosts, n.tcp)
	}
	Eventually(t, "the sentinels know each other and the replica", func() bool {
		for _, n := range s.Sentinels {
			if _, err := n.Do("SENTINEL", "CKQUORUM", SentinelName); err != nil {
				return false
			}
			others, err := n.Do("SENTINEL", "SENTINELS", SentinelName)
			if err != nil || strings.Count(others, "runid\n") < 2 {
				return false
			}
			replicas, err := n.Do("SENTINEL", "REPLICAS", SentinelName)
			if err != nil || !strings.Contains(replicas, "master-link-status\nok") {
				return false
			}
		}
		return true
	})
	s.URL = "redis+sentinel://" + strings.Join(hosts, ",") + "/" + SentinelName
	return s
}

func startSentinel(t testing.TB, bin string, conf []string) *Redis {
	t.Helper()
	return startOnPort(t, bin, func() []string {
		path := filepath.Join(t.TempDir(), "sentinel.conf")
		if err := os.WriteFile(path, []byte(strings.Join(conf, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{"sentinel", path}
	})
}

// startOnPort starts a server on a port of loopback. Another test may take the port
// first, so it tries again, with flags that are made anew.
func startOnPort(t testing.TB, bin string, flags func() []string) *Redis {
	t.Helper()
	return start(t, &Redis{bin: bin}, flags)
}

// startTLS is startOnPort of a server that speaks TLS there.
func startTLS(t testing.TB, bin string, flags func() []string) *Redis {
	t.Helper()
	return start(t, &Redis{bin: bin, tls: true}, flags)
}

func start(t testing.TB, r *Redis, flags func() []string) *Redis {
	t.Helper()
	dir, err := os.MkdirTemp("", "weir") //nolint:usetesting // short: the path of a socket has a bound
	if err != nil {
		t.Fatal(err)
	}
	r.dir = dir
	t.Cleanup(func() {
		r.Kill()
		_ = os.RemoveAll(dir)
	})
	for range 10 {
		r.tcp = "127.0.0.1:" + FreePort(t)
		if flags != nil {
			r.flags = flags()
		}
		if r.start() == nil {
			r.URL = "redis://" + r.tcp
			return r
		}
		r.Kill()
		if r.tls && strings.Contains(r.log.String(), "TLS support") {
			t.Skipf("%s was built without TLS", r.bin)
		}
	}
	t.Fatalf("no port for %s:\n%s", r.bin, r.log.String())
	return nil
}
