package redis

import (
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// topology is what is behind an address.
type topology int

const (
	oneServer topology = iota
	sentinels
	cluster
)

// address is what a URL says of where Redis is.
type address struct {
	topology topology
	network  string   // tcp or unix
	hosts    []string // host:port of the server, the sentinels or some nodes; or the path of the socket
	tls      bool
	primary  string // what the sentinels call it
	user     string
	password string
	db       int
}

const (
	redisPort    = "6379"
	sentinelPort = "26379"
)

const forms = "redis://[user:password@]host:port[/db], rediss:// for TLS, unix://[user:password@]/path[?db=N], redis+sentinel://[user:password@]host:port,host:port/primary[/db] or redis+cluster://[user:password@]host:port,host:port"

var errEscape = errors.New("the URL cannot be read; in user and password : / ? # @ and % are written as %3A %2F %3F %23 %40 and %25")

// HasPassword reports whether a URL has a password in it.
func HasPassword(text string) bool {
	a, err := parseAddress(text)
	return err == nil && a.password != ""
}

// Address is where a URL says that Redis is, as host:port,host:port or the path of a socket,
// without user and password; "" of a URL that cannot be read.
func Address(text string) string {
	a, err := parseAddress(text)
	if err != nil {
		return ""
	}
	return strings.Join(a.hosts, ",")
}

// parseAddress reads a URL. It is not net/url's or go-redis's: the first knows no
// list of hosts, the second takes two dozen options that would break promises. No
// error has any text of the URL, which may be a password's.
func parseAddress(text string) (address, error) {
	a := address{network: "tcp"}
	scheme, rest, found := strings.Cut(text, "://")
	if !found {
		return a, errors.New("the URL has no scheme; it is " + forms)
	}
	if strings.Contains(rest, "#") {
		return a, errEscape
	}
	port := redisPort
	switch scheme {
	case "redis":
	case "unix":
		a.network = "unix"
	case "redis+sentinel", "rediss+sentinel":
		a.topology, port = sentinels, sentinelPort
	case "redis+cluster", "rediss+cluster":
		a.topology = cluster
	case "rediss":
	default:
		return a, errors.New("the URL's scheme is unknown; it is " + forms)
	}
	a.tls = strings.HasPrefix(scheme, "rediss")

	rest, query, _ := strings.Cut(rest, "?")
	authority, path, _ := strings.Cut(rest, "/")
	hosts := authority
	if i := strings.LastIndex(authority, "@"); i >= 0 {
		hosts = authority[i+1:]
		if err := a.credentials(authority[:i]); err != nil {
			return a, err
		}
	}
	if a.network == "tcp" && strings.Contains(path+query, "@") {
		return a, errEscape
	}
	if err := a.parameters(query); err != nil {
		return a, err
	}
	if a.network == "unix" {
		socket, err := url.PathUnescape(path)
		if err != nil || path == "" || hosts != "" {
			return a, errors.New("the URL is not unix://[user:password@]/path[?db=N]")
		}
		a.hosts = []string{"/" + socket}
		return a, nil
	}
	if err := a.path(path); err != nil {
		return a, err
	}
	list := strings.Split(hosts, ",")
	if a.topology == oneServer && len(list) > 1 {
		return a, errors.New("the URL has several hosts, which only redis+sentinel:// and redis+cluster:// have")
	}
	for _, h := range list {
		host, err := hostPort(h, port)
		if err != nil {
			return a, err
		}
		a.hosts = append(a.hosts, host)
	}
	return a, nil
}

func (a *address) credentials(text string) error {
	user, password, _ := strings.Cut(text, ":")
	var err, err2 error
	a.user, err = url.PathUnescape(user)
	a.password, err2 = url.PathUnescape(password)
	if err != nil || err2 != nil || strings.ContainsAny(text, "@") || strings.Contains(password, ":") {
		return errEscape
	}
	return nil
}

func (a *address) parameters(query string) error {
	if query == "" {
		return nil
	}
	name, value, _ := strings.Cut(query, "=")
	if a.network != "unix" || name != "db" {
		return errors.New("the URL has parameters; only unix:// has one, ?db=N")
	}
	return a.database(value)
}

// path reads what follows the hosts: /db, or /primary/db.
func (a *address) path(path string) error {
	db := strings.TrimSuffix(path, "/")
	switch a.topology {
	case oneServer:
	case cluster:
		if db != "" {
			return errors.New("the URL has a database, and a cluster has only 0; it is redis+cluster://[user:password@]host:port,host:port")
		}
	case sentinels:
		var err error
		a.primary, db, _ = strings.Cut(db, "/")
		if a.primary, err = url.PathUnescape(a.primary); err != nil || a.primary == "" {
			return errors.New("the URL does not say what the sentinels call the primary; it is redis+sentinel://[user:password@]host:port,host:port/primary[/db]")
		}
	}
	if db == "" {
		return nil
	}
	return a.database(db)
}

func (a *address) database(text string) (err error) {
	if a.db, err = strconv.Atoi(text); err != nil || a.db < 0 {
		return errors.New("the URL's database is not a number from 0")
	}
	return nil
}

// hostPort completes a host of a URL: an IPv6 address is in brackets.
func hostPort(text, port string) (string, error) {
	host := text
	if i := strings.LastIndex(text, ":"); i >= 0 && !strings.HasSuffix(text, "]") {
		host, port = text[:i], text[i+1:]
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", errors.New("the URL's port is not 1..65535; it is " + forms)
	}
	bracketed := strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]")
	if bracketed {
		host = host[1 : len(host)-1]
		if net.ParseIP(host) == nil {
			return "", errors.New("the URL has brackets around what is no IPv6 address")
		}
	}
	if host == "" || strings.ContainsAny(host, " []%") || !bracketed && strings.Contains(host, ":") {
		return "", errors.New("the URL has a host that is empty or not one; it is " + forms + ", with IPv6 addresses in brackets")
	}
	return net.JoinHostPort(host, port), nil
}
